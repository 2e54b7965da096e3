"""The cycles of a TPU's program are its compiler's own, where it compiles."""

import jax
import jax.numpy as jnp
import pytest

from policy.estimate.compilation import compiled_step
from tests.benchmarks.accelerators import target


@pytest.mark.slow
def test_the_text_of_a_compiled_program_has_the_compilers_cycles():
    """The text that XLA writes into its dump has none, and each kernel would be at its roofline."""
    chip = target("v5e:1x1")
    placed = jax.sharding.SingleDeviceSharding(chip.devices[0])
    array = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=placed)
    lowered = jax.jit(jnp.dot).trace(array, array).lower(lowering_platforms=("tpu",))
    assert '"estimated_cycles":' in compiled_step(lowered, chip, ("x", "y")).text

"""The cycles of a TPU's program are its compiler's own, where it compiles."""

import jax
import jax.numpy as jnp
import pytest

import policy
from policy.inspect.estimate.costing import compiled_step
from tests.benchmarks.accelerators import target


@pytest.mark.slow
def test_the_text_of_a_compiled_program_has_the_compilers_cycles():
    """The text that XLA writes into its dump has none, and each kernel would be at its roofline."""
    chip = target("v5e:1x1")
    placed = jax.sharding.SingleDeviceSharding(chip.devices[0])
    array = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=placed)
    lowered = jax.jit(jnp.dot).trace(array, array).lower(lowering_platforms=("tpu",))
    assert '"estimated_cycles":' in compiled_step(lowered, chip, ("x", "y")).text


@pytest.mark.slow
def test_a_program_that_is_too_large_has_no_cycles_bytes_and_kernels():
    """Its text is not the final one: costs of it were below what its matmuls take at the peak."""
    array = jax.ShapeDtypeStruct((3 * 2**20, 1024), jnp.float32)
    found = policy.estimate(jnp.tanh, array, policies=["float32"], on=target("v5e:1x1"))
    row = found["float32"]
    assert row.is_exhausted and row.memory > row.capacity
    assert (row.cycles, row.seconds, row.bytes, row.kernels) == (None, None, None, None)
    assert "lacks" in str(found)

"""Programs compiled for a TPU v5e and an H100: skipped where their compilers are not installed, but
in CI.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.accel import layers, program
from benchmarks.accel.program import measure, placed
from benchmarks.layers import layer
from policy.inspect.estimate.targets import Target
from policy.inspect.hlo import costs as hlo
from policy.inspect.hlo.costs import turns
from policy.inspect.hlo.text import parse
from tests.benchmarks.accelerators import target

W, X = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((64, 128), jnp.float32)
CHIPS = ("v5e:1x1", "h100")


@pytest.fixture(scope="module", autouse=True)
def without_a_cache_of_programs():
    """The GPU's compiler can't read what it wrote there without a GPU."""
    before = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture(params=CHIPS)
def chip(request) -> Target:
    return target(request.param)


def scanned(steps, w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=steps)[0]


def reversed_scan(steps, w, x):
    inputs = jnp.arange(steps * x.size, dtype=x.dtype).reshape(steps, *x.shape)
    return lax.scan(lambda c, x: (jnp.tanh(c @ w) + x, c.sum(1)), x, inputs, reverse=True)


def nested_scan(steps, w, x):
    return lax.scan(lambda c, _: (scanned(5, w, c), None), x, None, length=steps)[0]


def rematerialised(steps, w, x):
    body = jax.checkpoint(lambda c, _: (jnp.tanh(jnp.tanh(c @ w) @ w), None))
    return lax.scan(body, x, None, length=steps)[0]


def mapped(steps, w, x):
    return lax.map(lambda i: jnp.tanh(x @ w) * i, jnp.arange(steps, dtype=x.dtype))


def fori(steps, w, x):
    return lax.fori_loop(3, 3 + steps, lambda i, c: jnp.tanh(c @ w), x)


def gradient(function):
    def loss(steps, w, x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(steps, w, x)))

    return lambda steps, w, x: jax.grad(loss, (1, 2))(steps, w, x)


LOOPS = [scanned, reversed_scan, nested_scan, mapped, fori]
GRADIENTS = [gradient(f) for f in (scanned, reversed_scan, nested_scan, rematerialised, mapped)]


def compiled(chip: Target, function) -> str:
    lowered = (
        jax.jit(function)
        .trace(*placed(chip, (W, X)))
        .lower(lowering_platforms=(chip.chip.platform,))
    )
    return lowered.compile().as_text() or ""


def loops(text: str) -> set[int | None]:
    return {turns(i) for i in parse(text).instructions.values() if i.opcode == "while"}


@pytest.mark.parametrize("function", [*LOOPS, *GRADIENTS])
def test_a_loop_runs_as_often_as_it_was_told(chip, function):
    found = loops(compiled(chip, lambda w, x: function(7, w, x)))
    assert found in ({7}, {5, 7})


@pytest.mark.parametrize("function", [scanned, gradient(mapped)])
def test_what_a_loop_costs_is_proportional_to_its_steps(chip, function):
    few, more, most = (
        hlo.costs_of(compiled(chip, lambda w, x, n=n: function(n, w, x))) for n in (7, 14, 28)
    )
    # What is outside of the loop cancels in differences.
    quantities = ("kernels", "time") if chip.kind == "v5e" else ("kernels", "bytes")
    for quantity in quantities:
        first, second, third = (getattr(costs, quantity) for costs in (few, more, most))
        assert (third - second) / (second - first) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_a_large_matmuls_cycles_are_the_published_peaks(name):
    chip = target(name)
    square = placed(chip, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    figures = measure(chip, lambda a, b: a @ b, [square, square])
    at_the_peak = 2 * 4096**3 / chip.chip.peak("bfloat16")
    assert at_the_peak <= figures.cycles / chip.chip.clock < 1.4 * at_the_peak


def test_a_whole_layer_is_measured(chip):
    dense = layer(
        "Dense",
        (256, 128),
        lambda w, **o: w.Dense(128, **o),
        lambda w, **o: w.Linear(128, 128, **o),
    )
    ours = layers.figures(chip, dense, "linen", ours=True)
    assert ours.bytes >= 2 * 256 * 128 * 2 and not ours.uncounted


def test_more_than_a_chip_holds_is_refused_with_the_figure():
    chip = target("v5e:1x1")
    large = placed(chip, jax.ShapeDtypeStruct((2**17, 2**16), jnp.bfloat16))
    with pytest.raises(program.OutOfMemory, match="RESOURCE_EXHAUSTED"):
        measure(chip, lambda x: jnp.sin(x) + 1, [large])

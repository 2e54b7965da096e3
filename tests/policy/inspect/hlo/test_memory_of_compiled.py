"""Memory read from what compilers write, beside their own figures, on CPU, TPU and GPU."""

import functools
import shutil
from pathlib import Path
from typing import Any, cast

import flax.linen
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy.inspect.hlo.buffers import MemoryUse, memory_of
from policy.inspect.hlo.dump import compiled_with_dump, read_dump
from policy.programs.paths import spelled
from policy.programs.tracing.trace import lowered as lowered_call
from tests.benchmarks.accelerators import target

OUT_OF_MEMORY = Path(__file__).with_name("v5e_out_of_memory")


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.tanh(linen.Dense(x.shape[-1], name="dense")(x)), None


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        layers = flax.linen.scan(
            flax.linen.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        return linen.Dense(8, name="head")(layers(name="layers")(x, None)[0])


class Pair(nnx.Module):
    def __init__(self, width, rngs):
        self.first, self.second = (nnx.Linear(width, width, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.second(nnx.gelu(self.first(x)))


def compiled(name, function, *shapes, donated=()):
    """Returns the compiled program, and the memory that is read of it."""
    where = target(name)
    sharding = jax.sharding.SingleDeviceSharding(where.devices[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    traced = jax.jit(function, donate_argnums=donated).trace(*jax.tree.map(place, shapes))
    program, dump = compiled_with_dump(traced.lower(lowering_platforms=(where.platform,)))
    return program, memory_of(dump)


def stepped(apply, params, x):
    loss = lambda p: jnp.sum(jnp.square(apply(p, x)))  # noqa: E731
    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params)), x + 1


def check_sums(program, memory: MemoryUse):
    stated = program.memory_analysis()
    assert memory.arguments == stated.argument_size_in_bytes
    assert memory.outputs == stated.output_size_in_bytes - stated.alias_size_in_bytes
    held = sum(buffer.bytes for buffer in memory.buffers if buffer.kind == "temporary")
    assert held <= memory.temporaries
    return stated.temp_size_in_bytes, held


@pytest.mark.slow
@pytest.mark.parametrize("name", ("cpu", "v5e:1x1"))
def test_a_scanned_linen_model_takes_what_the_compiler_says(name):
    # The TPU's is too large for the chip's own memory.
    rows, width = {"cpu": (256, 64), "v5e:1x1": (65536, 256)}[name]
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    step = functools.partial(stepped, Net().apply)
    program, memory = compiled(name, step, params, x, donated=(0,))
    stated, held = check_sums(program, memory)
    if not name.startswith("v5e"):  # whose figure has gaps twice, and memory of the chip's own
        assert memory.temporaries == stated
    assert held > 0.9 * memory.temporaries
    stack = next(b for b in memory.buffers if b.shape == (4, rows, width))
    assert stack.kind == "temporary" and spelled(stack.path).startswith("layers")
    assert stack.source.startswith("test_memory_of_compiled.py:")
    kernel = next(b for b in memory.buffers if b.shape == (4, width, width))
    assert (kernel.kind, kernel.label) == (
        "argument",
        "params['params']['layers']['dense']['kernel']",
    )
    largest_output = next(b for b in memory.buffers if b.kind == "output")
    assert (largest_output.shape, largest_output.operation) == ((rows, width), "add")


@pytest.mark.slow
@pytest.mark.parametrize("name", ("cpu", "h100"))
def test_an_nnx_models_buffers_have_its_modules_paths(name):
    model = flax_nnx.eval_shape(lambda: Pair(128, flax_nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    call = lowered_call(lambda model, x: model(x), (model, x), {})
    assert call is not None

    def step(params, rest, others):
        loss = lambda p: jnp.sum(jnp.square(call.result(call.pure(p, rest, others))))  # noqa: E731
        return jax.grad(loss)(params)

    program, memory = compiled(name, step, *call.args)
    stated, _ = check_sums(program, memory)
    assert memory.temporaries == stated
    paths = {spelled(b.path) for b in memory.buffers if b.kind == "temporary"}
    assert "first" in paths


def test_an_argument_that_is_not_used_is_no_argument_of_the_program():
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    _, memory = compiled("cpu", lambda a, b, c: b @ c, square, square, square)
    found = [(b.parameter, b.label) for b in memory.buffers if b.kind == "argument"]
    assert found == [(0, "b"), (1, "c")]


def test_a_program_in_the_persistent_cache_is_read_as_well():
    jax.config.update("jax_enable_compilation_cache", True)
    lowered = jax.jit(lambda a: a - 3).lower(jnp.zeros(5))
    lowered.compile()
    program, dump = compiled_with_dump(lowered)
    assert program is not None and memory_of(dump).arguments == 20
    assert cast(Any, jax.config).jax_enable_compilation_cache is True


@pytest.mark.slow
def test_a_program_that_is_too_large_for_a_chip_is_read():
    shape = jax.ShapeDtypeStruct((163840, 20480), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((20480, 20480), jnp.bfloat16)

    def f(x, w):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            return jnp.tanh(x @ w)

    program, memory = compiled("v5e:1x1", f, shape, kernel)
    assert program is None
    assert memory.total > 16e9
    assert {spelled(b.path) for b in memory.buffers if b.kind == "temporary"} == {"first"}


class Fails:
    """A program whose compiler writes its files, and then fails."""

    def __init__(self, message: str, files: bool = True):
        self.message, self.files = message, files

    def compile(self, compiler_options: dict[str, str]) -> Any:
        if self.files:
            shutil.copytree(OUT_OF_MEMORY, compiler_options["xla_dump_to"], dirs_exist_ok=True)
        raise jax.errors.JaxRuntimeError(self.message)


def test_a_compiler_that_ran_out_of_memory_is_read():
    program, dump = compiled_with_dump(cast(Any, Fails("RESOURCE_EXHAUSTED: ...")))
    assert program is None and dump == read_dump(OUT_OF_MEMORY)


@pytest.mark.parametrize(
    "fails", [Fails("INTERNAL: out of luck"), Fails("RESOURCE_EXHAUSTED: out of luck", files=False)]
)
def test_other_errors_of_a_compiler_are_raised(fails):
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of luck"):
        compiled_with_dump(cast(Any, fails))

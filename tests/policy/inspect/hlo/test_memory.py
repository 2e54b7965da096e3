"""Memory read from what compilers write: in texts that are stored, and beside their own figures."""

import functools
import shutil
from typing import Any, cast

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

import policy
from mpmodules import linen
from policy.inspect.estimate.costing import compiled_step
from policy.inspect.estimate.targets import Target
from policy.inspect.hlo.dump import (
    Dump,
    allocations_of,
    compiled_with_dump,
    read_dump,
)
from policy.inspect.hlo.memory import library_scratch, memory_of
from tests.benchmarks.accelerators import target
from tests.policy.inspect.hlo.texts import FOLDER, text_of

OUT_OF_MEMORY = FOLDER / "v5e_out_of_memory"
GIB = 2**30
F32 = jnp.float32

ASSIGNMENT = text_of("buffer_assignment")


def test_allocations_are_told_apart_by_what_they_hold():
    found = allocations_of(Dump("", ASSIGNMENT))
    assert [(a.kind, a.bytes, a.parameter) for a in found] == [
        ("argument", 64, 7),  # of a tuple: its number in it
        ("output", 16, None),
        ("output", 512, None),
        ("thread-local", 8, None),
        ("constant", 12, None),
        ("on-chip", 4096, None),
        ("temporary", 100, None),
    ]
    assert found[1].values[0].array is None
    assert found[4].values[0].place == ("constant.2..sunk.1", ())
    assert found[6].values[2].place == ("while.1", (2,))
    # Temporaries of 60 and 80 bytes take turns in one place.
    assert [value.place[0] for value in found[6].largest()] == ["alone"]


def test_a_text_that_assigns_no_memory_is_rejected():
    with pytest.raises(ValueError, match="assigns no memory: it begins with 'nothing'"):
        allocations_of(Dump("", "nothing"))


def test_a_program_that_runs_out_of_memory_takes_what_its_error_says_and_names_its_buffers():
    large, small = (163840, 20480), (20480, 20480)
    memory = memory_of(read_dump(OUT_OF_MEMORY), ("w", "x"))
    total = memory.arguments + memory.outputs + memory.temporaries + memory.constants
    assert f"{total / GIB:.2f}" == "26.56"  # "... for HLO temporaries (26.56G) exceeds ..."
    sizes: dict[Any, int] = {shape: shape[0] * shape[1] * 2 for shape in (large, small)}
    assert memory.arguments == sizes[small] + sizes[large]
    assert memory.outputs == sizes[large] + 512  # and a table of addresses
    assert memory.temporaries == 2 * sizes[large] + sizes[small]
    assert [(b.kind, b.shape, b.path, b.operation, b.source) for b in memory.buffers] == [
        ("argument", large, "x", "", ""),
        ("output", large, "", "add", "train.py:27 (step)"),
        ("temporary", large, "blk1", "dot_general", "train.py:25 (f)"),
        ("temporary", large, "blk2", "dot_general", "train.py:25 (f)"),
        ("argument", small, "w", "", ""),
        ("temporary", small, "blk2", "dot_general", "train.py:25 (f)"),
    ]
    for buffer in memory.buffers:
        assert (buffer.dtype, buffer.bytes) == ("bfloat16", sizes[buffer.shape])


def test_a_copy_of_an_argument_names_it():
    values = """allocation 0: size 64, preallocated-temp:
 value: <1 of_argument @0> (size=32,offset=0): f32[8]{0}
 value: <2 of_result @0> (size=32,offset=32): f32[8]{0}
"""
    dump = Dump(text_of("makers"), values)
    for names, argument in ((["args[0]"], "args[0]"), ([], "")):
        assert [(b.kind, b.path, b.operation) for b in memory_of(dump, names).buffers] == [
            ("temporary", argument, "convert"),
            ("temporary", "act", "convert"),
        ]


def test_a_folder_without_one_program_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"should hold two files of one .* but has none: the"):
        read_dump(tmp_path)
    (tmp_path / "b.after_optimizations.txt").write_text("")
    with pytest.raises(ValueError, match=r"but has b\.after_optimizations\.txt: the compiler"):
        read_dump(tmp_path)


class Fails:
    """A program whose compiler writes its files, and then fails."""

    def __init__(self, message: str, files: bool = True):
        self.message, self.files = message, files

    def compiler_ir(self, dialect: str) -> Any:
        return jax.jit(lambda x: x).lower(1.0).compiler_ir(dialect)

    def compile(self, compiler_options: dict[str, str]) -> Any:
        if self.files:
            shutil.copytree(OUT_OF_MEMORY, compiler_options["xla_dump_to"], dirs_exist_ok=True)
        raise jax.errors.JaxRuntimeError(self.message)


def test_constants_of_a_program_without_kernels_are_left_out_of_its_texts():
    weights = np.arange(64.0 * 64, dtype=np.float32).reshape(64, 64) ** 2
    _, dump = compiled_with_dump(jax.jit(lambda x: x @ weights).lower(jnp.ones((8, 64))))
    assert "constant({...})" in dump.program and "1024" not in dump.program


def test_a_compiler_that_ran_out_of_memory_is_read():
    program, dump = compiled_with_dump(cast(Any, Fails("RESOURCE_EXHAUSTED: ...")))
    assert program is None and dump == read_dump(OUT_OF_MEMORY)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "fails", [Fails("INTERNAL: out of luck"), Fails("RESOURCE_EXHAUSTED: out of luck", files=False)]
)
def test_other_errors_of_a_compiler_are_raised(fails):
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of luck"):
        compiled_with_dump(cast(Any, fails))


class FailsInTriton(Fails):
    """A program for a GPU that compiles without Triton's matmuls alone."""

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        if compiler_options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that ...")
        return super().compile(compiler_options)


def test_matmuls_that_triton_finds_no_tiles_for_are_compiled_without_it():
    fails = FailsInTriton("RESOURCE_EXHAUSTED: ...")
    step = compiled_step(fails, Target("h100"), [])
    assert step.is_exhausted and step.text == read_dump(OUT_OF_MEMORY).program
    with pytest.raises(ValueError, match="h100's compiler rejects the program: INTERNAL: out of"):
        compiled_step(FailsInTriton("INTERNAL: out of luck"), Target("h100"), [])


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


def compiled(name, function, *shapes, donated=(), names=()):
    """Returns the compiled program, and the memory that is read of it."""
    where = target(name)
    sharding = jax.sharding.SingleDeviceSharding(where.devices[0])
    place = lambda x: ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    traced = jax.jit(function, donate_argnums=donated).trace(*jax.tree.map(place, shapes))
    program, dump = compiled_with_dump(traced.lower(lowering_platforms=(where.platform,)))
    return program, memory_of(dump, names, largest=1000)


def stepped(apply, params, x):
    loss = lambda p: jnp.sum(jnp.square(apply(p, x)))  # noqa: E731
    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params)), x + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ("cpu", "h100", "v5e:1x1"))
def test_a_scanned_linen_model_takes_what_the_compiler_says(name):
    # The TPU's is too large for the chip's own memory.
    rows, width = (65536, 256) if name == "v5e:1x1" else (256, 64)
    x = ShapeDtypeStruct((rows, width), F32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    step = functools.partial(stepped, Net().apply)
    leaves = jax.tree_util.tree_leaves_with_path((params, x))
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    program, memory = compiled(name, step, params, x, donated=(0,), names=names)
    assert program is not None
    stated: Any = program.memory_analysis()
    assert memory.arguments == stated.argument_size_in_bytes
    assert memory.outputs == stated.output_size_in_bytes - stated.alias_size_in_bytes
    if name != "v5e:1x1":  # whose figure has gaps twice, and memory of the chip's own
        assert memory.temporaries == stated.temp_size_in_bytes
    held = sum(buffer.bytes for buffer in memory.buffers if buffer.kind == "temporary")
    assert 0.9 * memory.temporaries < held <= memory.temporaries
    stack = next(b for b in memory.buffers if b.shape == (4, rows, width))
    assert stack.kind == "temporary" and stack.path.startswith("layers")
    assert stack.source.startswith("test_memory.py:")
    kernel = next(b for b in memory.buffers if b.shape == (4, width, width))
    named = "[0]['params']['layers']['dense']['kernel']"
    assert (kernel.kind, kernel.path) == ("argument", named)
    largest_output = next(b for b in memory.buffers if b.kind == "output")
    assert (largest_output.shape, largest_output.operation) == ((rows, width), "add")


def test_an_argument_that_is_not_used_is_no_argument_of_the_program():
    square = ShapeDtypeStruct((64, 64), F32)
    _, memory = compiled("cpu", lambda a, b, c: b @ c, square, square, square, names="bc")
    assert [b.path for b in memory.buffers if b.kind == "argument"] == ["b", "c"]


def test_a_program_in_the_persistent_cache_is_read_as_well():
    jax.config.update("jax_enable_compilation_cache", True)
    lowered = jax.jit(lambda a: a - 3).lower(jnp.zeros(5))
    lowered.compile()
    program, dump = compiled_with_dump(lowered)
    assert program is not None and memory_of(dump).arguments == 20
    assert cast(Any, jax.config).jax_enable_compilation_cache is True


CONVOLUTION = "ROOT %r = f32[4,8,8,2]{3,2,1,0} convolution(%p0, %p1), dim_labels=b01f_01io->b01f"
WINDOWED = "ROOT %r = f32[1,2]{1,0} reduce-window(%p2, %p3), window={size=32x32}"


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{CONVOLUTION}, window={{size=3x3 pad=1_1x0_2}}", 4 * 10 * 10 * 16 * 4),
        (CONVOLUTION, 4 * 8 * 8 * 16 * 4),
        ("ROOT %r = f32[64]{0} reduce(%p2, %p3), dimensions={0}, to_apply=%add", 32 * 64 * 4),
        ("ROOT %r = f32[32]{0} reduce(%p2, %p3), dimensions={1}, to_apply=%add", 0),
        ("ROOT %r = f32[] reduce(%p2, %p3), dimensions={0,1}, to_apply=%add", 0),
        (WINDOWED, 0),
        (f"%e = f32[32,64]{{1,0}} abs(%p2)\n  {WINDOWED.replace('p2', 'e')}", 32 * 64 * 4),
    ],
)
def test_a_library_kernel_copies_what_it_reads(body, expected):
    text = text_of("library_kernel").replace("BODY", body)
    assert library_scratch(text.replace("KIND", '"__ynn_fusion"')) == expected
    assert library_scratch(text.replace("KIND", '"__triton"')) == 0


@pytest.mark.slow
def test_an_estimate_on_a_processor_counts_the_copy_and_says_so():
    x = ShapeDtypeStruct((64, 1024), F32)
    fn = lambda x: jnp.sum(x, 0)  # noqa: E731
    found = policy.estimate(fn, x, policies=[None], on="cpu")
    program = jax.jit(fn).lower(x).compile()
    scratch = library_scratch(program.as_text() or "")
    planned: Any = program.memory_analysis()
    assert found.rows[0].temporaries == planned.temp_size_in_bytes + scratch
    assert any("library kernels" in note for note in found.notes) == (scratch > 0)

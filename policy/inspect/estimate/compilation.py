"""Compiles a lowered program for a target, and reads the figures of its compiler."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from policy.inspect.estimate.rows import Buffer
from policy.inspect.estimate.targets import Target
from policy.inspect.hlo.buffers import HeldBuffer, memory_of
from policy.inspect.hlo.dump import compiled_with_dump
from policy.inspect.hlo.library_scratch import library_scratch
from policy.programs.paths import naming, spelled

_LARGEST = 20  # buffers that a row has
_PACKAGES = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A program as a compiler made it, of one device.

    Attributes:
      text: its HLO, also where the compiler ran out of memory.
      arguments, temporaries, outputs, code: bytes of memory, of outputs those that overwrite no
        argument; constants count as code.
      is_exhausted: whether the compiler ran out of memory.
      buffers: the largest arrays when the most memory is taken.
      seconds: CPU seconds of the compiler.
      scratch: bytes of `temporaries` that a processor's library kernels may allocate.
    """

    text: str
    arguments: int
    temporaries: int
    outputs: int
    code: int
    is_exhausted: bool
    buffers: tuple[Buffer, ...]
    seconds: float
    scratch: int = 0


def compiled_step(lowered: Any, target: Target, names: Sequence[str]) -> CompiledStep:
    """Compiles the result of ``jax.jit(...).lower(...)``.

    Args:
      lowered: the lowered program.
      target: the target that it was lowered for.
      names: the path of each array that the program takes.

    Raises:
      ValueError: the compiler refuses it, for another reason than memory.
    """
    start = time.process_time()
    try:
        compiled, dump = compiled_with_dump(lowered)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{target.name}'s compiler refuses the program: {str(error).splitlines()[0]}"
        ) from error
    seconds = time.process_time() - start
    use = memory_of(dump)
    # The allocations themselves: libtpu's `memory_analysis` counts gaps between temporaries twice.
    # It alone has the code, which is not known of a program that is too large.
    memory: Any = None if compiled is None else compiled.memory_analysis()
    code = 0 if memory is None else memory.generated_code_size_in_bytes
    scratch = library_scratch(dump.program) if target.platform == "cpu" else 0
    return CompiledStep(
        # The compiler's cycles are in its own text alone, which a program that is too large lacks.
        dump.program if compiled is None else compiled.as_text() or "",
        use.arguments,
        use.temporaries + scratch,
        use.outputs,
        max(code, use.constants),
        compiled is None,
        tuple(_buffers(use.buffers[:_LARGEST], names)),
        seconds,
        scratch,
    )


def _buffers(held: Sequence[HeldBuffer], names: Sequence[str]) -> Iterator[Buffer]:
    with naming(buffer.path for buffer in held):
        for one in held:
            is_argument = one.parameter is not None and one.parameter < len(names)
            path = names[one.parameter or 0] if is_argument else spelled(one.path)
            yield Buffer(one.bytes, one.dtype, one.shape, one.kind, path, one.operation, one.source)


def compiler_of(target: Target) -> str:
    """Returns the name and version of a target's compiler, and JAX's."""
    names = ("jax", *_PACKAGES.get(target.platform, ("jaxlib",)))
    return ", ".join(f"{name} {found}" for name in names if (found := _version(name)))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

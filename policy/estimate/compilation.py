"""Compiles a lowered program for a target, and reads what its compiler says of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from policy.estimate.report import Buffer
from policy.estimate.targets import Target

_PACKAGES = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program as a compiler made it, of one device.

    Attributes:
      text: its HLO; "" where the compiler ran out of memory before it wrote any.
      arguments, temporaries, outputs, code: bytes of memory, of outputs those that overwrite no
        argument.
      is_exhausted: whether the compiler ran out of memory.
      buffers: the largest arrays when the most memory is taken.
      seconds: CPU seconds of the compiler.
    """

    text: str
    arguments: int
    temporaries: int
    outputs: int
    code: int
    is_exhausted: bool
    buffers: tuple[Buffer, ...]
    seconds: float


def compiled_program(lowered: Any, target: Target, names: tuple[str, ...]) -> Program:
    """Compiles the result of ``jax.jit(...).lower(...)``.

    Args:
      lowered: the lowered program.
      target: the target that it was lowered for.
      names: the path of each array that the program takes.

    Raises:
      ValueError: the compiler refuses it, for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        failure = ""
        compiled: Any = None
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            failure = str(error)
            if "RESOURCE_EXHAUSTED" not in failure and "Ran out of memory" not in failure:
                raise ValueError(
                    f"{target.name}'s compiler refuses the program: {failure.splitlines()[0]}"
                ) from error
        seconds = time.process_time() - start
        if compiled is None:
            return _exhausted(Path(folder), failure, seconds)
        memory = compiled.memory_analysis()
        return Program(
            compiled.as_text(),
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.output_size_in_bytes - memory.alias_size_in_bytes,
            memory.generated_code_size_in_bytes,
            False,
            (),
            seconds,
        )


def _exhausted(folder: Path, failure: str, seconds: float) -> Program:
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds", failure)
    needed = float(found[1]) * 1024.0 ** (" KMGT".index(found[2])) if found else 0.0
    texts = sorted(folder.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size)
    text = texts[-1].read_text() if texts else ""
    return Program(text, 0, int(needed), 0, 0, True, (), seconds)


def compiler_of(target: Target) -> str:
    """Returns the name and version of a target's compiler, and JAX's."""
    names = ("jax", *_PACKAGES.get(target.platform, ("jaxlib",)))
    return ", ".join(f"{name} {found}" for name in names if (found := _version(name)))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

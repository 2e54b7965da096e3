"""Reads the files that XLA writes about a program that it compiles, also where it runs out of
memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
from jax.experimental.compilation_cache import compilation_cache

_PROGRAM = "after_optimizations.txt"


@dataclasses.dataclass(frozen=True)
class Dump:
    """Texts about a compiled program.

    Attributes:
      program: its HLO, scheduled.
      allocations: where each value lies in memory.
      live_ranges: when each value is alive.
    """

    program: str = dataclasses.field(repr=False)
    allocations: str = dataclasses.field(repr=False)
    live_ranges: str = dataclasses.field(repr=False)


def compiled_with_dump(
    lowered: jax.stages.Lowered,
) -> tuple[jax.stages.Compiled | None, Dump]:
    """Compiles a program and reads the files that XLA writes about it.

    It compiles even if JAX's persistent cache has the program: XLA writes nothing about one that it
    loads.

    Returns:
      the program, None if it needs more memory than the device has; and the texts about it.

    Raises:
      jax.errors.JaxRuntimeError: it doesn't compile, for another reason or before it has memory
        assigned.
    """
    with tempfile.TemporaryDirectory(prefix="xla-") as folder, without_cache():
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            with contextlib.suppress(ValueError):
                return None, read_dump(folder)
            raise
        return compiled, read_dump(folder)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns JAX's persistent cache off, whose setting JAX 0.12 reads once unless it is reset."""
    was = cast(Any, jax.config).jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
        compilation_cache.reset_cache()


def read_dump(folder: str | Path) -> Dump:
    """Reads the files of the one program that XLA was told to write there, by ``xla_dump_to``.

    The TPU's compiler writes them before it raises ``RESOURCE_EXHAUSTED``, so that they name
    the arrays that do not fit.

    Raises:
      ValueError: the folder holds no program, several, or not all files of one.
    """
    programs = sorted(Path(folder).glob(f"*{_PROGRAM}"))
    if len(programs) != 1:
        found = ", ".join(path.name for path in programs) or "none"
        raise ValueError(
            f"{folder} should hold the files of one compiled program, but has {found}. Compile one "
            "program into an empty folder, with compiler_options={'xla_dump_to': folder}."
        )
    texts = [programs[0]]
    for ending in ("-buffer-assignment.txt", "-live-range.txt"):
        texts.append(programs[0].with_name(programs[0].name.removesuffix(".txt") + ending))
        if not texts[-1].exists():
            raise ValueError(
                f"{folder} has {programs[0].name} but no {texts[-1].name}: the compiler stopped "
                "before it assigned memory, or the program came from JAX's persistent cache."
            )
    return Dump(*(path.read_text() for path in texts))

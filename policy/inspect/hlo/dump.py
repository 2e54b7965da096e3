"""Reads the files that XLA writes about a program that it compiles, also where it runs out of
memory: the program, and where its values lie in memory.

The compilers for CPUs, GPUs and TPUs write ``buffer-assignment.txt`` alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
from jax.experimental.compilation_cache import compilation_cache

from policy.inspect.hlo.text import HloArray, arrays_in

_ENDINGS = (".txt", "-buffer-assignment.txt")
_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
# Integers of three axes, up to 2^17 characters of them; and such a constant as it is left out.
_TABLE = re.compile(r"%([\w.\-]+) = s\d+\[\d+,\d+,\d+\]\S* constant\((\{[-\d, {}]{,131072}\})\)")
_LEFT_OUT = re.compile(r"(%([\w.\-]+) = s\d+\[\d+,\d+,\d+\]\S* constant\()\{\.\.\.\}\)")
ResultPlace = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Dump:
    """Texts about a compiled program.

    Attributes:
      program: its HLO, scheduled.
      allocations: where each value lies in memory.
    """

    program: str = dataclasses.field(repr=False)
    allocations: str = dataclasses.field(repr=False)


def compiled_with_dump(
    lowered: jax.stages.Lowered, **options: Any
) -> tuple[jax.stages.Compiled | None, Dump]:
    """Compiles a program and reads the files that XLA writes about it.

    It compiles even if JAX's persistent cache has the program: XLA writes nothing about one that it
    loads.

    Args:
      lowered: the program.
      options: of the compiler.

    Returns:
      the program, None if it needs more memory than the device has; and the texts about it.

    Raises:
      jax.errors.JaxRuntimeError: it doesn't compile, for another reason or before it has memory
        assigned.
    """
    with tempfile.TemporaryDirectory(prefix="xla-") as folder, without_cache():
        try:
            options |= {"xla_dump_to": folder, "xla_dump_large_constants": _has_tables(lowered)}
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            with contextlib.suppress(ValueError):
                return None, read_dump(folder)
            raise
        return compiled, read_dump(folder)


def _has_tables(lowered: jax.stages.Lowered) -> bool:
    """Returns whether a program runs kernels on a TPU, whose constants are worth writing: those of
    other programs may be as large as their params.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    return "tpu_custom_call" in module.operation.get_asm(large_elements_limit=16)


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
      ValueError: the folder doesn't hold all files of one program.
    """
    patterns = [f"*after_optimizations{ending}" for ending in _ENDINGS]
    found = [path for pattern in patterns for path in Path(folder).glob(pattern)]
    if len(found) != len(_ENDINGS):
        raise ValueError(
            f"{folder} should hold two files of one compiled program, but has "
            f"{', '.join(path.name for path in found) or 'none'}: the compiler stopped before it "
            "assigned memory, or the program came from JAX's persistent cache."
        )
    return Dump(*(path.read_text() for path in found))


def with_tables(text: str, dump: Dump) -> str:
    """Writes the small constants of integers into a compiled program's text, which leaves out
    arrays of more than ten elements: the tables by which kernels choose their blocks are among
    them.

    Args:
      text: of `Compiled.as_text()`.
      dump: of the same program.
    """
    tables = dict(_TABLE.findall(dump.program))

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}{tables[found[2]]})" if found[2] in tables else found[0]

    return _LEFT_OUT.sub(written, text) if tables else text


# --------------------------------------------------------------------------------------------------
# Allocations
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """An array that an instruction makes.

    Attributes:
      place: the instruction's name, and the index in its result if that is a tuple.
      offset: in its allocation.
      bytes: its size with padding.
      array: its dtype and shape; None of a tuple, a table of addresses.
    """

    place: ResultPlace
    offset: int
    bytes: int
    array: HloArray | None

    def overlaps(self, other: StoredValue) -> bool:
        """Returns whether two values of one allocation share memory."""
        is_before = self.offset < other.offset + other.bytes
        return is_before and other.offset < self.offset + self.bytes


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory that a program takes as a whole, for values that take turns in it.

    Attributes:
      bytes: its size.
      kind: "argument", "output", "temporary", "constant", "thread-local", or "on-chip" in a memory
        of the chip's own. An output that overwrites a donated argument is an argument.
      parameter: the number of an argument.
      values: those that lie in it, at one time or another, in the order in which they are made.
    """

    bytes: int
    kind: str
    parameter: int | None
    values: list[StoredValue] = dataclasses.field(default_factory=list)

    def largest(self) -> list[StoredValue]:
        """Returns the largest values that share no memory; of those of one size, the first made."""
        chosen: list[StoredValue] = []
        for value in sorted(self.values, key=lambda value: -value.bytes):
            if not any(map(value.overlaps, chosen)):
                chosen.append(value)
        return chosen


def allocations_of(dump: Dump) -> list[Allocation]:
    """Returns the allocations of a program, with the values that lie in them.

    Raises:
      ValueError: the text of the allocations has none.
    """
    allocations: list[Allocation] = []
    for line in dump.allocations.splitlines():
        if opened := _ALLOCATION.match(line):
            allocations.append(_allocation(int(opened[1]), opened[2]))
        elif (found := _VALUE.match(line)) and allocations:
            place = found[1], tuple(int(n) for n in (found[2] or "").split(",") if n)
            arrays = () if found[5].startswith("(") else arrays_in(found[5])
            value = StoredValue(place, int(found[4]), int(found[3]), next(iter(arrays), None))
            allocations[-1].values.append(value)
    if not allocations:
        begins = dump.allocations[:60]
        raise ValueError(f"The text assigns no memory: it begins with {begins!r}.")
    return allocations


def _allocation(size: int, rest: str) -> Allocation:
    parameter = re.search(r", parameter (\d+), shape .* at ShapeIndex \{(\d*)", rest)
    kinds = {
        r", color [1-9]": "on-chip",  # 0 is the device's main memory
        ", parameter": "argument",
        ", maybe-live-out": "output",
        ", constant": "constant",
        ", thread-local": "thread-local",
    }
    kind = next((kind for word, kind in kinds.items() if re.search(word, rest)), "temporary")
    return Allocation(size, kind, int(parameter[2] or parameter[1]) if parameter else None)

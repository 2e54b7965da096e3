"""Parses where a compiled program's values lie in memory, and when they are alive.

The texts are XLA's ``buffer-assignment.txt`` and ``live-range.txt``, which the compilers for CPUs,
GPUs and TPUs write alike.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from policy.inspect.hlo.text import HloArray, arrays_in

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_RANGE = re.compile(r"\s+(\S+)\{([\d,]*)\}:(\d+)-(\d+)$")
ResultPlace = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """An array that an instruction makes.

    Attributes:
      place: the instruction's name, and the index in its result if that is a tuple.
      bytes: its size with padding.
      offset: in its allocation.
      array: its dtype and shape; None of a tuple, a table of addresses.
    """

    place: ResultPlace
    bytes: int
    offset: int
    array: HloArray | None


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory that a program takes as a whole, for values that take turns in it.

    Attributes:
      bytes: its size.
      color: the memory that it is in; 0 is the device's main memory, others are the chip's own.
      kind: "argument", "output", "temporary", "constant" or "thread-local". An output that
        overwrites a donated argument is an argument.
      parameter: the number of an argument.
      values: those that lie in it, at one time or another.
    """

    bytes: int
    color: int
    kind: str
    parameter: int | None
    values: tuple[StoredValue, ...]


def allocations_of(text: str) -> list[Allocation]:
    """Returns the allocations in the text of ``buffer-assignment.txt``.

    Raises:
      ValueError: there are none in it.
    """
    found: list[tuple[re.Match[str], list[StoredValue]]] = []
    for line in text.splitlines():
        if opened := _ALLOCATION.match(line):
            found.append((opened, []))
        elif (value := _VALUE.match(line)) and found:
            found[-1][1].append(_value(value))
    if not found:
        raise ValueError(f"The text assigns no memory: it begins with {text[:60]!r}.")
    return [_allocation(opened, tuple(values)) for opened, values in found]


def _value(found: re.Match[str]) -> StoredValue:
    arrays = () if found[5].startswith("(") else arrays_in(found[5])
    return StoredValue(
        _place(found[1], found[2] or ""), int(found[3]), int(found[4]), next(iter(arrays), None)
    )


def _place(name: str, index: str) -> ResultPlace:
    return name, tuple(int(n) for n in index.split(",") if n)


def _allocation(opened: re.Match[str], values: tuple[StoredValue, ...]) -> Allocation:
    rest = opened[3]
    color = re.search(r", color (\d+)", rest)
    parameter = re.search(r", parameter (\d+), shape .* at ShapeIndex \{(\d*)", rest)
    number = int(parameter[2] or parameter[1]) if parameter else None
    kinds = {"maybe-live-out": "output", "constant": "constant", "thread-local": "thread-local"}
    kind = next((kind for word, kind in kinds.items() if f", {word}" in rest), "temporary")
    return Allocation(
        int(opened[2]),
        int(color[1]) if color else 0,
        "argument" if parameter else kind,
        number,
        values,
    )


def live_ranges_of(text: str) -> dict[ResultPlace, tuple[int, int]]:
    """Returns the first and last moment of each value in the text of ``live-range.txt``."""
    found = filter(None, map(_RANGE.match, text.splitlines()))
    return {_place(match[1], match[2]): (int(match[3]), int(match[4])) for match in found}


def last_of(
    allocation: Allocation, ranges: Mapping[ResultPlace, tuple[int, int]]
) -> StoredValue | None:
    """Returns the array in an allocation that is alive for the longest, which an output is."""
    arrays = [value for value in allocation.values if value.array is not None]
    return max(arrays, key=lambda value: ranges.get(value.place, (-1, -1))[::-1], default=None)


def largest_moment(
    allocations: Iterable[Allocation], ranges: Mapping[ResultPlace, tuple[int, int]]
) -> list[StoredValue]:
    """Returns the values that are alive when they take the most memory, the largest first.

    Of values that share memory at that moment, because an operation overwrites its operand, it
    returns the one that is made last.
    """
    best, taken = [], -1
    for alive in _moments(allocations, ranges):
        if sum(value.bytes for _, value in alive) <= taken:
            continue
        apart = list(_apart(alive, ranges))
        size = sum(value.bytes for value in apart)
        if size > taken:
            best, taken = apart, size
    return best


def _moments(
    allocations: Iterable[Allocation], ranges: Mapping[ResultPlace, tuple[int, int]]
) -> Iterator[list[tuple[int, StoredValue]]]:
    """Yields the values that are alive, with their allocations' numbers, whenever one is made."""
    starting: dict[int, list[tuple[int, StoredValue]]] = {}
    for number, allocation in enumerate(allocations):
        for value in allocation.values:
            if value.place in ranges:
                starting.setdefault(ranges[value.place][0], []).append((number, value))
    alive: list[tuple[int, StoredValue]] = []
    for moment in sorted(starting):
        alive = [entry for entry in alive if ranges[entry[1].place][1] >= moment]
        alive += starting[moment]
        yield alive


def _apart(
    alive: list[tuple[int, StoredValue]], ranges: Mapping[ResultPlace, tuple[int, int]]
) -> Iterator[StoredValue]:
    """Yields the values that share no memory, the largest first."""
    chosen: list[tuple[int, StoredValue]] = []
    for number, value in sorted(alive, key=lambda e: (-e[1].bytes, -ranges[e[1].place][0])):
        if not any(n == number and _overlap(value, other) for n, other in chosen):
            chosen.append((number, value))
            yield value


def _overlap(one: StoredValue, other: StoredValue) -> bool:
    return one.offset < other.offset + other.bytes and other.offset < one.offset + one.bytes

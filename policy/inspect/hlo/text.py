"""Parses a compiled program's text into computations and instructions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_SIZES = {
    "pred": 1,
    "token": 0,
    "opaque": 0,
    "c64": 8,
    "c128": 16,
    "s4": 0.5,
    "u4": 0.5,
    "s2": 0.25,
    "u2": 0.25,
}
_ARRAY = re.compile(r"\b(pred|token|opaque|bf16|[sufc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class HloArray:
    """One array of an instruction's result. `on_chip` is whether it lies in a memory of the chip's
    own.
    """

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        digits = re.match(r"(?:bf|[sufc])(\d+)", self.dtype)
        size = _SIZES[self.dtype] if self.dtype in _SIZES else int(digits[1]) / 8 if digits else 0
        return size * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation. `rest` is the text after its operands."""

    name: str
    opcode: str
    results: tuple[HloArray, ...]
    operands: tuple[str, ...]
    literal: str
    rest: str
    is_root: bool

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The names of the computations that it calls, by attribute."""
        return {
            key: tuple(re.findall(r"%([\w.\-]+)", names))
            for key, names in _CALLED.findall(self.rest)
        }

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it has none, written as a negative or as the largest
        number.
        """
        found = re.search(r'"estimated_cycles":"?(\d+)', self.rest)
        return int(found[1]) if found and int(found[1]) != 2**63 - 1 else None

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """The JAX operation that it was made for."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions.values() if i.opcode == "parameter"}


def parse(text: str) -> tuple[dict[str, Computation], Computation]:
    """Parses a module's text: returns its computations by name, and its entry."""
    computations: dict[str, Computation] = {}
    entry, current, lines = "", "", {}
    for line in _lines(text):
        if line.endswith("{") and (opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
            current, lines = opened[2], {}
            entry = current if opened[1] else entry
            computations[current] = Computation(current, lines)
        elif current and (found := re.match(r"  (ROOT )?%?([\w.\-]+) = ", line)):
            instruction = _instruction(found[2], line[found.end() :], bool(found[1]))
            for name in instruction.operands:
                _add_element(lines, name)
            lines[found[2]] = instruction
        elif line.strip() == "}":
            current = ""
    if not entry:
        raise ValueError("The text is not an HLO module: it has no ENTRY.")
    return computations, computations[entry]


def _add_element(lines: dict[str, Instruction], name: str) -> None:
    """Adds the get-tuple-element that an operand such as ``%tuple#1`` stands for, which XLA of
    jaxlib 0.12 doesn't write.
    """
    whole, _, index = name.rpartition("#")
    if not whole or name in lines:
        return
    _add_element(lines, whole)
    found = lines[whole].results if whole in lines else ()
    results = found[int(index) : int(index) + 1]
    rest = f", index={index}"
    lines[name] = Instruction(
        name, "get-tuple-element", results, (whole,), f"%{whole}", rest, False
    )


def _lines(text: str) -> Iterator[str]:
    """Yields the text's lines; an instruction whose attributes have line breaks (a Pallas kernel's)
    is one line.
    """
    held = ""
    for line in text.splitlines():
        if (
            held
            and line.strip() != "}"
            and not re.match(r"  (ROOT )?%?[\w.\-]+ = |(ENTRY )?%?[\w.\-]+ \(", line)
        ):
            held += line
            continue
        if held:
            yield held
        held = line
    if held:
        yield held


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    results = arrays_in(text[:end])
    opened = text.index("(", end)
    closed = _closing(text, opened)
    inside = text[opened + 1 : closed]
    operands = tuple(re.findall(r"%([\w.\-]+(?:#\d+)*)", inside))
    return Instruction(
        name, text[end:opened].strip(), results, operands, inside, text[closed + 1 :], is_root
    )


def arrays_in(text: str) -> tuple[HloArray, ...]:
    """Returns the arrays of a shape, of a tuple each of its parts."""
    return tuple(
        HloArray(
            dtype,
            tuple(int(n) for n in shape.split(",") if n),
            bool(re.search(r"S\([1-9]\d*\)", layout)),
        )
        for dtype, shape, layout in _ARRAY.findall(text)
    )


def _closing(text: str, opened: int) -> int:
    depth = 0
    for match in re.finditer(r"[()]", text[opened:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opened + match.start()
    raise ValueError(f"Parentheses do not close in {text[:200]!r}.")


def through_moves(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction

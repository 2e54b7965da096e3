"""Parses a compiled program's text into computations and instructions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_ARRAY = re.compile(r"\b(pred|token|opaque|bf16|[sufc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|(?:true|false)_computation|"
    r"called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_MOVES = ("copy", "bitcast", "convert", "copy-done", "copy-start")
# A line break inside of an instruction, such as a Pallas kernel's attributes have: what follows
# begins no instruction and no computation, and ends none.
_INSIDE = re.compile(
    r"\n(?!  (?:ROOT )?%?[\w.\-]+ = |(?:ENTRY )?%?[\w.\-]+ \(| *\} *$)", re.MULTILINE
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
        bits = int(digits[1]) if digits else 8 if self.dtype == "pred" else 0
        return bits / 8 * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """A line of a computation.

    Attributes:
      name, opcode, results: as they are written.
      literal: the text between the parentheses, where its operands are.
      rest: the text after them.
      is_root: whether it is the computation's result.
      computation: the one that it stands in.
    """

    name: str
    opcode: str
    results: tuple[HloArray, ...]
    literal: str
    rest: str
    is_root: bool
    computation: Computation = dataclasses.field(repr=False)

    @functools.cached_property
    def operands(self) -> tuple[Instruction, ...]:
        known = self.computation.instructions
        return tuple(known[name] for name in _NAME.findall(self.literal) if name in known)

    @functools.cached_property
    def called(self) -> dict[str, tuple[Computation, ...]]:
        """The computations that it calls, by attribute."""
        known = self.computation.module.computations
        return {
            key: tuple(known[name] for name in _NAME.findall(names) if name in known)
            for key, names in _CALLED.findall(self.rest)
        }

    @property
    def fused(self) -> Computation:
        """The computation of a fusion."""
        return self.called["calls"][0]

    def unfused(self) -> Iterator[Instruction]:
        """Yields the instruction itself, or those of a fusion and of the fusions in it."""
        if self.opcode.removesuffix("-start") != "fusion":
            yield self
            return
        for instruction in self.fused.instructions.values():
            yield from instruction.unfused()

    def before_moves(self) -> Instruction:
        """Returns the instruction whose result this one moves or converts; out of a fusion, too."""
        found = self
        while True:
            caller = found.computation.caller
            if found.opcode in _MOVES:
                found = found.operands[0]
            elif found.opcode == "parameter" and caller and caller.opcode == "fusion":
                found = caller.operands[int(found.literal)]
            else:
                return found

    def attribute(self, pattern: str) -> str:
        """Returns the group of a pattern in the text after the operands; "" where it isn't."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None where it has none, written as a negative or as the largest
        number.
        """
        found = self.attribute(r'"estimated_cycles":"?(\d+)')
        return int(found) if found and int(found) != 2**63 - 1 else None

    @property
    def target(self) -> str:
        """The function that a custom call runs."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def op_name(self) -> str:
        """The JAX operation that it was made for."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def index(self) -> int:
        """The place of a get-tuple-element in its tuple."""
        return int(self.attribute(r"index=(\d+)"))


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A function of a module: its instructions by name, each after its operands."""

    name: str
    module: Module = dataclasses.field(repr=False)
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions.values() if i.opcode == "parameter"}

    @property
    def caller(self) -> Instruction | None:
        """The instruction that calls it; of several, the last."""
        return self.module.callers.get(self.name)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program: its computations by name, and the name of the one that runs first."""

    computations: dict[str, Computation]
    entry_name: str

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        return {i.name: i for c in self.computations.values() for i in c.instructions.values()}

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        return {
            computation.name: instruction
            for instruction in self.instructions.values()
            for called in instruction.called.values()
            for computation in called
        }


def parse(text: str) -> Module:
    """Parses a module's text.

    Raises:
      ValueError: it has no entry.
    """
    entry = re.search(r"^ENTRY %?([\w.\-]+) \(", text, re.MULTILINE)
    if entry is None:
        raise ValueError("The text is not an HLO module: it has no ENTRY.")
    module = Module({}, entry[1])
    current = None
    for line in _INSIDE.sub("", text).splitlines():
        if line.endswith("{") and (opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
            current = module.computations[opened[1]] = Computation(opened[1], module)
        elif current and (found := re.match(r"  (ROOT )?%?([\w.\-]+) = ", line)):
            made = _instruction(found[2], line[found.end() :], bool(found[1]), current)
            for name in _NAME.findall(made.literal):
                _add_element(current, name)
            current.instructions[made.name] = made
        elif line.strip() == "}":
            current = None
    return module


def _add_element(inside: Computation, name: str) -> None:
    """Adds the get-tuple-element that an operand such as ``%tuple#1`` stands for, which XLA of
    jaxlib 0.12 doesn't write.
    """
    whole, _, index = name.rpartition("#")
    if not whole or name in inside.instructions:
        return
    _add_element(inside, whole)
    found = inside.instructions[whole].results if whole in inside.instructions else ()
    results = found[int(index) : int(index) + 1]
    inside.instructions[name] = Instruction(
        name, "get-tuple-element", results, f"%{whole}", f", index={index}", False, inside
    )


def _instruction(name: str, text: str, is_root: bool, inside: Computation) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opened = text.index("(", end)
    closed = _closing(text, opened)
    opcode, literal = text[end:opened].strip(), text[opened + 1 : closed]
    return Instruction(
        name, opcode, arrays_in(text[:end]), literal, text[closed + 1 :], is_root, inside
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


def numpy_name(dtype: str) -> str:
    """Returns NumPy's name of an HLO dtype: "bf16" is "bfloat16", "f8e4m3fn" "float8_e4m3fn"."""
    found = re.fullmatch(r"(bf|f|s|u|c)(\d+)(e\d+m\d+\w*)?", dtype)
    if not found:
        return "bool" if dtype == "pred" else dtype
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    return kinds[found[1]] + found[2] + (f"_{found[3]}" if found[3] else "")

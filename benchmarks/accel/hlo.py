"""A compiled program's text: its computations, and what a run of it costs by the compiler's own estimates.

A loop's body counts as often as it runs, of a conditional's branches the costliest. What can't be counted is named, not
taken for free: a loop whose number of turns can't be read, a kernel that the compiler gives no cycles for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

_SIZES = {"pred": 1, "token": 0, "opaque": 0, "c64": 8, "c128": 16, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25}
_ARRAY = re.compile(r"\b(pred|token|opaque|bf16|[sufc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# Instructions that move nothing and run nothing.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
    + ("opt-barrier", "add-dependency", "domain", "copy-done", "all-reduce-done", "all-gather-done")
    + ("collective-permute-done", "async-done", "async-update", "send-done", "recv-done", "slice-done")
)
_ALLOCATIONS = ("AllocateBuffer", "CreateBuffer", "AssumeGatherIndicesInBound")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result. `on_chip` is whether it lies in a memory of the chip's own."""

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
    """A line of a computation. `rest` is what follows its operands."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    rest: str
    is_root: bool

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations that it names, by attribute."""
        return {key: tuple(re.findall(r"%([\w.\-]+)", names)) for key, names in _CALLED.findall(self.rest)}

    @property
    def cycles(self) -> int | None:
        found = re.search(r'"estimated_cycles":"?(-?\d+)', self.rest)
        return int(found[1]) if found else None

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
    """The computations of a module, by name, and its entry."""
    computations: dict[str, Computation] = {}
    entry, current, lines = "", "", {}
    for line in text.splitlines():
        if line.endswith("{") and (opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
            current, lines = opened[2], {}
            entry = current if opened[1] else entry
            computations[current] = Computation(current, lines)
        elif current and (found := re.match(r"  (ROOT )?%?([\w.\-]+) = ", line)):
            lines[found[2]] = _instruction(found[2], line[found.end() :], bool(found[1]))
        elif line.startswith("}"):
            current = ""
    if not entry:
        raise ValueError("The text is no HLO module: it has no ENTRY.")
    return computations, computations[entry]


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    results = tuple(
        Array(dtype, tuple(int(n) for n in shape.split(",") if n), bool(re.search(r"S\([1-9]\d*\)", layout)))
        for dtype, shape, layout in _ARRAY.findall(text[:end])
    )
    opened = text.index("(", end)
    closed = _closing(text, opened)
    inside = text[opened + 1 : closed]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, text[end:opened].strip(), results, operands, inside, text[closed + 1 :], is_root)


def _closing(text: str, opened: int) -> int:
    depth = 0
    for match in re.finditer(r"[()]", text[opened:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opened + match.start()
    raise ValueError(f"Parentheses do not close in {text[:200]!r}.")


# ---------------------------------------------------------------------------------------------------------------------
# How often a loop runs
# ---------------------------------------------------------------------------------------------------------------------


def turns(computations: dict[str, Computation], inside: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs; None where that depends on data.

    It is the compiler's own count where the text has it; else the counter's start, bound and step are read.
    """
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.rest)
    if known:
        return int(known[1])
    condition = computations[loop.called["condition"][0]]
    body = computations[loop.called["body"][0]]
    compare = condition.root
    while compare.opcode in ("copy", "bitcast", "convert"):
        compare = condition.instructions[compare.operands[0]]
    if compare.opcode == "fusion":
        fused = computations[compare.called["calls"][0]]
        if fused.root.opcode != "compare":
            return None
        outer = [condition.instructions[name] for name in compare.operands]
        sides = [_through(fused, fused.instructions[name], outer) for name in fused.root.operands]
        compare = fused.root
    elif compare.opcode == "compare":
        sides = [condition.instructions[name] for name in compare.operands]
    else:
        return None
    start = inside.instructions[loop.operands[0]]
    counter = _index(condition, sides[0])
    bound = _number(condition, sides[1])
    if bound is None and (index := _index(condition, sides[1])) is not None:
        bound = _entering(inside, start, index)
    if counter is None or bound is None:
        return None
    first, step = _entering(inside, start, counter), _step(computations, body, counter, inside, start)
    direction = re.search(r"direction=(\w+)", compare.rest)
    if first is None or not step or direction is None:
        return None
    if direction[1] in ("LT", "GT"):
        return max(0, math.ceil((bound - first) / step))
    if direction[1] in ("LE", "GE"):
        return max(0, math.floor((bound - first) / step) + 1)
    return (bound - first) // step if direction[1] == "NE" and (bound - first) % step == 0 else None


def _through(fused: Computation, instruction: Instruction, outer: list[Instruction]) -> Instruction:
    """What an instruction of a fusion is outside of it, where it is one of the fusion's operands."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = fused.instructions[instruction.operands[0]]
    return outer[int(instruction.literal)] if instruction.opcode == "parameter" else instruction


def _settled(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _number(computation: Computation, instruction: Instruction) -> int | None:
    instruction = _settled(computation, instruction)
    is_integer = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal)
    return int(instruction.literal) if is_integer else None


def _index(computation: Computation, instruction: Instruction) -> int | None:
    """Which part of the loop's state an instruction is."""
    instruction = _settled(computation, instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    found = re.search(r"index=(\d+)", instruction.rest)
    is_state = computation.instructions[instruction.operands[0]].opcode == "parameter"
    return int(found[1]) if found and is_state else None


def _entering(inside: Computation, start: Instruction, index: int) -> int | None:
    start = _settled(inside, start)
    if start.opcode != "tuple":
        return None
    return _number(inside, inside.instructions[start.operands[index]])


def _step(
    computations: dict[str, Computation], body: Computation, counter: int, inside: Computation, start: Instruction
) -> int | None:
    """By how much a turn of the loop moves its counter."""
    result = body.root
    if result.opcode != "tuple":
        return None
    add = _settled(body, body.instructions[result.operands[counter]])
    names, holder, outer = add.operands, body, None
    if add.opcode == "fusion":
        outer = [body.instructions[name] for name in add.operands]
        holder = computations[add.called["calls"][0]]
        add, names = holder.root, holder.root.operands
    if add.opcode not in ("add", "subtract"):
        return None
    total, moves = 0, False
    for position, name in enumerate(names):
        side = holder.instructions[name]
        where = holder
        if outer is not None:
            inner = _settled(holder, side)
            side, where = (outer[int(inner.literal)], body) if inner.opcode == "parameter" else (inner, holder)
        if _index(where, side) == counter:
            moves = True
            continue
        value = _number(where, side)
        if value is None and (index := _index(where, side)) is not None:
            value = _entering(inside, start, index)
        if value is None:
            return None
        total += -value if add.opcode == "subtract" and position else value
    return total if moves else None


# ---------------------------------------------------------------------------------------------------------------------
# Costs
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Costs:
    """Of one run.

    Attributes:
      cycles: the compiler's estimate, of what it has one for.
      bytes: read from and written to memory by kernels: results and operands, of slices what is sliced.
      kernels: how many run.
      collectives: bytes of one device's results, by operation and dtype.
      uncounted: what no cycles are known for, and loops whose turns are not.
      by_name: cycles by JAX operation.
    """

    cycles: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    collectives: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    uncounted: list[str] = dataclasses.field(default_factory=list)
    by_name: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, other: Costs, times: int = 1) -> None:
        self.cycles += times * other.cycles
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        for key, value in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, 0.0) + times * value
        for name, value in other.by_name.items():
            self.by_name[name] = self.by_name.get(name, 0.0) + times * value
        self.uncounted += other.uncounted


def costs_of(text: str, kernel_cycles: Callable[[float, float], float] | None = None) -> Costs:
    """What one run of a compiled program costs.

    Args:
      text: of `Compiled.as_text()`.
      kernel_cycles: cycles of a kernel that the compiler gives none for, from its FLOPs and bytes (a roofline); None
        leaves it uncounted.
    """
    computations, entry = parse(text)
    return _Counter(computations, kernel_cycles).of(entry)


class _Counter:
    def __init__(self, computations: dict[str, Computation], kernel_cycles: Callable[[float, float], float] | None):
        self.computations, self.kernel_cycles = computations, kernel_cycles
        self.found: dict[str, Costs] = {}

    def of(self, computation: Computation) -> Costs:
        if computation.name not in self.found:
            costs = self.found[computation.name] = Costs()
            for instruction in computation.instructions.values():
                self._count(costs, computation, instruction)
        return self.found[computation.name]

    def _count(self, costs: Costs, inside: Computation, instruction: Instruction) -> None:
        opcode, called = instruction.opcode, instruction.called
        if opcode == "while":
            times = turns(self.computations, inside, instruction)
            if times is None:
                costs.uncounted.append(f"the turns of {instruction.name} ({instruction.op_name})")
            for key in ("condition", "body"):
                costs.add(self.of(self.computations[called[key][0]]), 1 if times is None else times)
        elif opcode == "conditional":
            names = called.get("branch_computations", ()) or tuple(
                re.findall(r"(?:true|false)_computation=%([\w.\-]+)", instruction.rest)
            )
            branches = [self.of(self.computations[name]) for name in names]
            costs.add(max(branches, key=lambda branch: (branch.cycles, branch.bytes)))
        elif opcode in ("call", "async-start"):
            for names in called.values():
                for name in names:
                    costs.add(self.of(self.computations[name]))
        elif opcode not in _FREE:
            self._count_kernel(costs, inside, instruction)

    def _count_kernel(self, costs: Costs, inside: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            for array in _received(instruction):
                key = (opcode, array.dtype)
                costs.collectives[key] = costs.collectives.get(key, 0.0) + array.bytes
            return
        if opcode == "custom-call" and (instruction.target in _ALLOCATIONS or not instruction.operands):
            return
        moved = sum(self._moved(inside, instruction))
        cycles = instruction.cycles
        if cycles is None and opcode == "custom-call" and "cost_estimate" in instruction.rest:
            flops = re.search(r'"flops":"?(\d+)', instruction.rest)
            if self.kernel_cycles is not None:
                cycles = self.kernel_cycles(float(flops[1]) if flops else 0.0, moved)
        if cycles is None and opcode == "custom-call":
            costs.uncounted.append(f"cycles of {instruction.target} ({instruction.op_name})")
        name = _short(instruction.op_name) or opcode
        costs.add(Costs(float(cycles or 0), moved, 1, by_name={name: float(cycles or 0)}))

    def _moved(self, inside: Computation, instruction: Instruction) -> Iterator[float]:
        """Bytes of each operand and result that a kernel moves to or from memory."""
        operands = [inside.instructions[name] for name in instruction.operands if name in inside.instructions]
        fused = self.computations[instruction.called["calls"][0]] if instruction.opcode == "fusion" else None
        if instruction.opcode == "dynamic-update-slice":
            yield 2 * _outside(operands[1].results)
            return
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            yield 2 * _outside(instruction.results)
            return
        for number, operand in enumerate(operands):
            whole = _outside(operand.results)
            yield whole if fused is None else min(whole, _read(fused, number, whole))
        yield _outside(instruction.results) if fused is None else _written(fused, _outside(instruction.results))


def _outside(arrays: tuple[Array, ...]) -> float:
    return sum(array.bytes for array in arrays if not array.on_chip)


def _read(fused: Computation, number: int, whole: float) -> float:
    """Bytes that a fusion reads of an operand: of one that it only slices, or updates in place, the slices."""
    parameter = fused.parameters.get(number)
    if parameter is None:
        return whole
    users = [i for i in fused.instructions.values() if parameter.name in i.operands]
    read = 0.0
    for user in users:
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == parameter.name:
            read += sum(array.bytes for array in user.results)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            read += 0.0
        else:
            return whole
    return read if users else whole


def _written(fused: Computation, whole: float) -> float:
    root = _settled(fused, fused.root)
    if root.opcode == "dynamic-update-slice":
        return sum(array.bytes for array in fused.instructions[root.operands[1]].results)
    return whole


def _received(instruction: Instruction) -> tuple[Array, ...]:
    """What a collective leaves on one device: of the pair of operands and results that a start has, the results."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.results
    arrays = tuple(array for array in instruction.results if array.shape)
    return arrays[len(arrays) // 2 :]


def _short(op_name: str) -> str:
    parts = [part for part in op_name.split("/") if not part.startswith(("jit(<", "jit(step", "jit(run"))]
    return "/".join(parts[-4:])

"""Counts the costs of a run of a compiled program from its text, by the compiler's own estimates.

A loop's body counts as often as it runs, and of a conditional the costliest branch. Whatever can't
be counted is named, not taken for free: a loop whose trip count can't be read, a kernel that the
compiler gives no cycles for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

from policy._hlo.kernels import flops_of
from policy._hlo.text import Computation, Instruction, parse
from policy._hlo.traffic import moved, produced
from policy._hlo.trip_counts import turns

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Instructions that move nothing and run nothing.
_FREE = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
    ),
    *("opt-barrier", "add-dependency", "domain"),
}
_ALLOCATIONS = ("AllocateBuffer", "CreateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast")


@dataclasses.dataclass
class Costs:
    """Costs of one run.

    Attributes:
      cycles: the sum of the compiler's estimates.
      bytes: read from and written to memory by kernels: results, and operands or the slices that
        are read of them.
      kernels: how many run.
      collectives: bytes of one device's results, of a reduce-scatter of its operands, by operation
        and dtype.
      uncounted: kernels whose cycles, and loops whose trip counts, are not known.
      rooflines: cycles by `kernel_cycles`, which `cycles` holds too, by JAX operation.
      by_name: cycles by JAX operation.
    """

    cycles: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    collectives: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    uncounted: list[str] = dataclasses.field(default_factory=list)
    rooflines: dict[str, float] = dataclasses.field(default_factory=dict)
    by_name: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, other: Costs, times: int = 1) -> None:
        self.cycles += times * other.cycles
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        for key, value in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, 0.0) + times * value
        for name, value in other.by_name.items():
            self.by_name[name] = self.by_name.get(name, 0.0) + times * value
        for name, value in other.rooflines.items():
            self.rooflines[name] = self.rooflines.get(name, 0.0) + times * value
        self.uncounted += other.uncounted


def costs_of(text: str, kernel_cycles: Callable[[float, float], float] | None = None) -> Costs:
    """Counts the costs of one run of a compiled program.

    Args:
      text: of `Compiled.as_text()`.
      kernel_cycles: cycles of a kernel that the compiler gives none for, from its FLOPs and bytes
        (a roofline), those to and from the chip's own memory among them; None leaves it uncounted.
    """
    computations, entry = parse(text)
    anywhere, _ = parse(re.sub(r"S\(\d+\)", "", text))
    return _Counter(computations, anywhere, kernel_cycles).of(entry)


class _Counter:
    def __init__(
        self,
        computations: dict[str, Computation],
        anywhere: dict[str, Computation],
        kernel_cycles: Callable[[float, float], float] | None,
    ):
        self.computations, self.anywhere, self.kernel_cycles = computations, anywhere, kernel_cycles
        self.found: dict[str, Costs] = {}
        self.channels: set[tuple[str, str]] = set()

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
        elif opcode not in _FREE and not opcode.endswith(("-done", "-update")):
            self._count_kernel(costs, inside, instruction)

    def _count_kernel(self, costs: Costs, inside: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            _exchange(costs, inside, instruction)
            return
        fused = list(self._fused_collectives(instruction)) if opcode == "fusion" else []
        for holder, collective in fused:
            # One that runs beside kernels stands in several fusions, from its start to its end.
            channel = re.search(r"channel_id=(\d+)", collective.rest)
            key = channel[1] if channel else collective.name
            if (inside.name, key) not in self.channels:
                self.channels.add((inside.name, key))
                _exchange(costs, holder, collective)
        if fused and instruction.cycles is None:
            return
        if opcode == "custom-call" and (
            instruction.target in _ALLOCATIONS or not instruction.operands
        ):
            return
        bytes_moved = moved(self.computations, inside, instruction)
        name = _short(instruction.op_name) or instruction.target or opcode
        cycles = instruction.cycles
        if cycles is None and self._runs_beside(inside, instruction):
            costs.add(Costs(bytes=bytes_moved))
            return
        if cycles is None:
            cycles = self._by_roofline(costs, inside, instruction, name)
        costs.add(Costs(float(cycles), bytes_moved, 1, by_name={name: float(cycles)}))

    def _fused_collectives(self, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the collectives of a fusion, nested ones included, each with its computation."""
        fused = self.computations[fusion.called["calls"][0]]
        for instruction in fused.instructions.values():
            if instruction.opcode in COLLECTIVES:
                yield fused, instruction
            elif instruction.opcode == "fusion":
                yield from self._fused_collectives(instruction)

    def _runs_beside(self, inside: Computation, instruction: Instruction) -> bool:
        """Returns whether an instruction takes no cycles: one of scalars, or a copy by the memory's
        own engine.
        """
        if instruction.opcode.endswith("-start"):
            return True
        operands = [
            inside.instructions[name]
            for name in instruction.operands
            if name in inside.instructions
        ]
        arrays = [array for i in (instruction, *operands) for array in i.results]
        return instruction.opcode not in ("fusion", "custom-call") and not any(
            array.shape for array in arrays
        )

    def _by_roofline(
        self, costs: Costs, inside: Computation, instruction: Instruction, name: str
    ) -> float:
        """Returns the roofline's cycles of an instruction without an estimate; only custom calls
        have FLOPs.
        """
        operands = [
            inside.instructions[name]
            for name in instruction.operands
            if name in inside.instructions
        ]
        flops = flops_of(instruction, operands) if instruction.opcode == "custom-call" else 0.0
        if self.kernel_cycles is None or flops is None:
            costs.uncounted.append(
                f"cycles of {instruction.target or instruction.opcode} ({instruction.op_name})"
            )
            return 0.0
        holder = self.anywhere[inside.name]
        touched = moved(self.anywhere, holder, holder.instructions[instruction.name])
        cycles = self.kernel_cycles(flops, touched)
        costs.rooflines[name] = costs.rooflines.get(name, 0.0) + cycles
        return cycles


def _exchange(costs: Costs, inside: Computation, collective: Instruction) -> None:
    opcode = collective.opcode.removesuffix("-start")
    if opcode == "all-reduce" and inside.name.startswith("all-reduce-scatter"):
        # A TPU's: a fusion of a sum with the slice that each device keeps of it.
        opcode = "reduce-scatter"
    operands = [
        inside.instructions[name] for name in collective.operands if name in inside.instructions
    ]
    is_scatter = opcode == "reduce-scatter"
    arrays = (
        [a for i in operands for a in i.results] if is_scatter else produced(inside, collective)
    )
    for array in arrays:
        key = (opcode, array.dtype)
        costs.collectives[key] = costs.collectives.get(key, 0.0) + array.bytes


def _short(op_name: str) -> str:
    parts = [
        part for part in op_name.split("/") if not part.startswith(("jit(<", "jit(step", "jit(run"))
    ]
    return "/".join(parts[-4:])

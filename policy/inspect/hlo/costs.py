"""Counts the costs of a run of a compiled program from its text.

The time of a kernel is the compiler's own estimate where it has one. A loop's body counts as often
as it runs, and of a conditional the costliest branch. Whatever can't be counted is named, not taken
for free: a loop whose trip count can't be read, a kernel that the compiler gives no cycles for, an
opaque kernel of unknown FLOPs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

from policy.inspect.hlo.contractions import Flops, add_to
from policy.inspect.hlo.kernels import kernel_flops
from policy.inspect.hlo.module_paths import path_of_kernel, with_whole_paths
from policy.inspect.hlo.text import Computation, Instruction, parse
from policy.inspect.hlo.traffic import moved, produced
from policy.inspect.hlo.trip_counts import turns
from policy.programs.paths import Path

_COLLECTIVES = (
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


# The time of a kernel from its FLOPs by dtype and the bytes that it moves; None if it is unknown.
KernelTime = Callable[[Mapping[str, float], float], float | None]


@dataclasses.dataclass
class Costs:
    """Costs of one run, on one device.

    Attributes:
      time: the sum of the kernels' times: cycles by the compiler's estimates, where it makes any,
        and of kernels without one the `kernel_time` of `costs_of`. Exchanges take none.
      bytes: read from and written to memory by kernels: results, and operands or the slices that
        are read of them.
      kernels: how many run.
      flops: of matmuls and convolutions by the dtype that is multiplied, as
        `policy.inspect.hlo.contractions` names it.
      collectives: bytes of one device's results, of a reduce-scatter of its operands, by operation
        and dtype.
      exchanges: how many collectives run, by operation and dtype.
      uncounted: kernels whose times, and loops whose trip counts, are not known.
      rooflines: time by `kernel_time`, which `time` holds too, by JAX operation; empty where the
        compiler makes no estimates, as all of it is by `kernel_time` then.
      by_name: time by JAX operation.
      by_path: time by module path, forward and backward together; that outside of any module is
        under ``()``.
    """

    time: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    flops: Flops = dataclasses.field(default_factory=dict)
    collectives: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    exchanges: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    uncounted: list[str] = dataclasses.field(default_factory=list)
    rooflines: dict[str, float] = dataclasses.field(default_factory=dict)
    by_name: dict[str, float] = dataclasses.field(default_factory=dict)
    by_path: dict[Path, float] = dataclasses.field(default_factory=dict)

    @property
    def flops_by_dtype(self) -> Flops:
        """FLOPs of matmuls and convolutions by dtype alone, whatever their precision."""
        total: Flops = {}
        for key, flops in self.flops.items():
            add_to(total, {key.split(",")[0]: flops})
        return total

    def add(self, other: Costs, times: int = 1) -> None:
        """Adds the costs of another program that runs `times` times."""
        self.time += times * other.time
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        for name in ("flops", "collectives", "exchanges", "rooflines", "by_name", "by_path"):
            add_to(getattr(self, name), getattr(other, name), times)
        self.uncounted += other.uncounted


def costs_of(text: str, kernel_time: KernelTime | None = None) -> Costs:
    """Counts the costs of one run of a compiled program.

    Args:
      text: of `Compiled.as_text()`.
      kernel_time: of a kernel that the compiler gives no cycles for, from its FLOPs by dtype and
        its bytes, those to and from the chip's own memory among them
        (`policy.inspect.estimate.roofline`). It is in cycles for a program of a TPU, else in
        seconds. None leaves such kernels without a time, and names those in a program of cycles.
    """
    computations, entry = parse(text)
    anywhere, _ = parse(re.sub(r"S\(\d+\)", "", text))
    has_cycles = '"estimated_cycles":' in text
    costs = _Counter(computations, anywhere, kernel_time, has_cycles).of(entry)
    whole = with_whole_paths(costs.by_path)
    return dataclasses.replace(
        costs, by_path=whole, rooflines=costs.rooflines if has_cycles else {}
    )


class _Counter:
    def __init__(
        self,
        computations: dict[str, Computation],
        anywhere: dict[str, Computation],
        kernel_time: KernelTime | None,
        has_cycles: bool,
    ):
        self.computations, self.anywhere = computations, anywhere
        self.kernel_time, self.has_cycles = kernel_time, has_cycles
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
                costs.uncounted.append(
                    f"the trip count of {instruction.name} ({instruction.op_name})"
                )
            for key in ("condition", "body"):
                costs.add(self.of(self.computations[called[key][0]]), 1 if times is None else times)
        elif opcode == "conditional":
            names = called.get("branch_computations", ()) or tuple(
                re.findall(r"(?:true|false)_computation=%([\w.\-]+)", instruction.rest)
            )
            branches = [self.of(self.computations[name]) for name in names]
            costs.add(max(branches, key=lambda branch: (branch.time, branch.bytes)))
        elif opcode in ("call", "async-start"):
            for names in called.values():
                for name in names:
                    costs.add(self.of(self.computations[name]))
        elif opcode not in _FREE and not opcode.endswith(("-done", "-update")):
            self._count_kernel(costs, inside, instruction)

    def _count_kernel(self, costs: Costs, inside: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
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
        flops = kernel_flops(self.computations, inside, instruction)
        name = _short(instruction.op_name) or instruction.target or opcode
        time: float | None = instruction.cycles
        if time is None and self._runs_beside(inside, instruction):
            costs.add(Costs(bytes=bytes_moved, flops=flops or {}))
            return
        if time is None:
            time = self._by_roofline(costs, inside, instruction, name, flops)
        path = path_of_kernel(self.computations, instruction)
        costs.add(
            Costs(
                float(time),
                bytes_moved,
                1,
                flops or {},
                by_name={name: float(time)},
                by_path={path: float(time)} if time else {},
            )
        )

    def _fused_collectives(self, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the collectives of a fusion, nested ones included, each with its computation."""
        fused = self.computations[fusion.called["calls"][0]]
        for instruction in fused.instructions.values():
            if instruction.opcode in _COLLECTIVES:
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
        self,
        costs: Costs,
        inside: Computation,
        instruction: Instruction,
        name: str,
        flops: Flops | None,
    ) -> float:
        """Returns the roofline's time of an instruction without an estimate."""
        holder = self.anywhere[inside.name]
        touched = moved(self.anywhere, holder, holder.instructions[instruction.name])
        time = None if self.kernel_time is None else self.kernel_time(flops or {}, touched)
        label = f"{instruction.target or instruction.opcode} ({instruction.op_name})"
        if time is None:
            if self.has_cycles:
                costs.uncounted.append(f"cycles of {label}")
            return 0.0
        if flops is None:  # the time of its bytes is a lower bound
            costs.uncounted.append(f"FLOPs of {label}")
        costs.rooflines[name] = costs.rooflines.get(name, 0.0) + time
        return time


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
    for key in {(opcode, array.dtype) for array in arrays}:
        costs.exchanges[key] = costs.exchanges.get(key, 0) + 1


def _short(op_name: str) -> str:
    parts = [
        part for part in op_name.split("/") if not part.startswith(("jit(<", "jit(step", "jit(run"))
    ]
    return "/".join(parts[-4:])

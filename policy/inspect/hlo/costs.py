"""Counts the costs of a run of a compiled program from its text.

The time of a kernel is the compiler's own estimate where it has one. A loop's body counts as often
as it runs, and of a conditional the costliest branch. Whatever can't be counted is named, not taken
for free: a loop whose trip count can't be read, a kernel that the compiler gives no cycles for, an
opaque kernel of unknown FLOPs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

from policy.inspect.hlo import kernels
from policy.inspect.hlo.kernels import Flops, add_to
from policy.inspect.hlo.provenance import path_of_kernel, with_whole_paths
from policy.inspect.hlo.text import Computation, Instruction, Module, parse
from policy.inspect.hlo.timeline import Timeline
from policy.programs.paths import Path

_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    "ragged-all-to-all",
)
_ASYNC_START = "async-collective-start"  # a TPU's fusion that begins an exchange beside kernels
# Instructions that move nothing and run nothing.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
)
_ALLOCATIONS = ("AllocateBuffer", "CreateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast")


# The time of a kernel from its FLOPs by dtype and the bytes that it moves; None if it is unknown.
KernelTime = Callable[[Mapping[str, float], float], float | None]
# Bytes of exchanges by operation and dtype, and the time that they take; None if it is unknown.
Exchanged = Mapping[tuple[str, str], float]
ExchangeTime = Callable[[Exchanged], float | None]


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
        `policy.inspect.hlo.kernels` names it.
      collectives: bytes of one device's results, of a reduce-scatter of its operands, by operation
        and dtype.
      uncounted: kernels whose times, and loops whose trip counts, are not known.
      rooflines: time by `kernel_time`, which `time` holds too, by JAX operation; empty where the
        compiler makes no estimates, as all of it is by `kernel_time` then.
      by_path: time by module path, forward and backward together; that outside of any module is
        under ``()``.
      elapsed: the time of kernels and exchanges together, where exchanges run beside the kernels
        that the program's schedule has between their start and their end.
      busy: the time of the exchanges alone.
    """

    time: float = 0.0
    bytes: float = 0.0
    kernels: int = 0
    flops: Flops = dataclasses.field(default_factory=dict)
    collectives: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    uncounted: list[str] = dataclasses.field(default_factory=list)
    rooflines: dict[str, float] = dataclasses.field(default_factory=dict)
    by_path: dict[Path, float] = dataclasses.field(default_factory=dict)
    elapsed: float = 0.0
    busy: float = 0.0

    def add(self, other: Costs, times: int = 1) -> None:
        """Adds the costs of another program that runs `times` times."""
        self.time += times * other.time
        self.bytes += times * other.bytes
        self.kernels += times * other.kernels
        self.elapsed += times * other.elapsed
        self.busy += times * other.busy
        for name in ("flops", "collectives", "rooflines", "by_path"):
            add_to(getattr(self, name), getattr(other, name), times)
        self.uncounted += other.uncounted


def costs_of(
    text: str,
    kernel_time: KernelTime | None = None,
    exchange_time: ExchangeTime | None = None,
) -> Costs:
    """Counts the costs of one run of a compiled program.

    Args:
      text: of `Compiled.as_text()`.
      kernel_time: of a kernel that the compiler gives no cycles for, from its FLOPs by dtype and
        its bytes, those to and from the chip's own memory among them
        (`policy.inspect.estimate.roofline`). It is in cycles for a program of a TPU, else in
        seconds. None leaves such kernels without a time, and names those in a program of cycles.
      exchange_time: of exchanges, in the same unit; None leaves them out of `elapsed`.
    """
    has_cycles = '"estimated_cycles":' in text
    costs = _Counter(kernel_time, exchange_time, has_cycles).of(parse(text).entry)
    rooflines = costs.rooflines if has_cycles else {}
    return dataclasses.replace(costs, by_path=with_whole_paths(costs.by_path), rooflines=rooflines)


class _Counter:
    def __init__(
        self,
        kernel_time: KernelTime | None,
        exchange_time: ExchangeTime | None,
        has_cycles: bool,
    ):
        self.kernel_time, self.exchange_time = kernel_time, exchange_time
        self.has_cycles = has_cycles
        self.found: dict[str, Costs] = {}

    def of(self, computation: Computation) -> Costs:
        if computation.name not in self.found:
            costs, timeline = Costs(), Timeline()
            for instruction in computation.instructions.values():
                self._count(costs, timeline, instruction)
            timeline.wait_for_all()
            costs.elapsed, costs.busy = timeline.elapsed, timeline.busy
            self.found[computation.name] = costs
        return self.found[computation.name]

    def _count(self, costs: Costs, timeline: Timeline, instruction: Instruction) -> None:
        opcode, called = instruction.opcode, instruction.called
        every = [computation for computations in called.values() for computation in computations]
        if opcode in ("while", "conditional", "call", "async-start"):
            inside = self._inside(instruction, every)
            costs.add(inside)
            if opcode == "async-start" and not inside.time:
                timeline.start(instruction.name, inside.busy)
            else:
                timeline.run(inside.elapsed, inside.busy)
        elif opcode.endswith("-done"):
            timeline.wait(_started(instruction).name)
        elif opcode not in _FREE and not opcode.endswith("-update"):
            self._count_kernel(costs, timeline, instruction)

    def _inside(self, instruction: Instruction, every: list[Computation]) -> Costs:
        """Returns the costs of the computations that an instruction calls."""
        costs = Costs()
        if instruction.opcode == "conditional":
            costs.add(max(map(self.of, every), key=lambda branch: (branch.time, branch.bytes)))
            return costs
        times = turns(instruction) if instruction.opcode == "while" else 1
        if times is None:
            where = f"{instruction.name} ({instruction.op_name})"
            costs.uncounted.append(f"the trip count of {where}")
        for computation in every:
            costs.add(self.of(computation), 1 if times is None else times)
        return costs

    def _send(
        self, costs: Costs, timeline: Timeline, collective: Instruction, start: str = ""
    ) -> None:
        """Counts an exchange. It runs until the timeline waits for its `start`; without one nothing
        runs beside it.
        """
        sent = _sent(collective)
        add_to(costs.collectives, sent)
        time = (self.exchange_time(sent) if self.exchange_time else None) or 0.0
        if start:
            timeline.start(start, time)
        else:
            timeline.exchange(time)

    def _count_kernel(self, costs: Costs, timeline: Timeline, instruction: Instruction) -> None:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
            is_start = instruction.opcode.endswith("-start")
            self._send(costs, timeline, instruction, instruction.name if is_start else "")
            return
        fused = {_channel(one): one for one in instruction.unfused() if one.opcode in _COLLECTIVES}
        for channel, collective in fused.items():
            stages = _stages(instruction.computation).get(channel, ())
            if stages and stages[0] is instruction:
                self._send(costs, timeline, collective, channel if len(stages) > 1 else "")
        self._count_time(costs, timeline, instruction, bool(fused))
        for channel in fused:
            stages = _stages(instruction.computation).get(channel, ())
            if stages and stages[-1] is instruction:
                timeline.wait(channel)

    def _count_time(
        self, costs: Costs, timeline: Timeline, instruction: Instruction, fused: bool
    ) -> None:
        opcode = instruction.opcode.removesuffix("-start")
        if fused and instruction.cycles is None:
            return
        is_opaque = opcode == "custom-call"
        if is_opaque and (instruction.target in _ALLOCATIONS or not instruction.operands):
            return
        bytes_moved, flops = kernels.moved(instruction), kernels.kernel_flops(instruction)
        time: float | None = instruction.cycles
        if time is None and _runs_beside(instruction):
            costs.add(Costs(bytes=bytes_moved, flops=flops or {}))
            return
        if time is None:
            time = self._by_roofline(costs, instruction, flops)
        by_path = {path_of_kernel(instruction): float(time)} if time else {}
        timeline.run(float(time))
        costs.add(Costs(float(time), bytes_moved, 1, flops or {}, by_path=by_path))

    def _by_roofline(self, costs: Costs, instruction: Instruction, flops: Flops | None) -> float:
        """Returns the roofline's time of an instruction without an estimate."""
        touched = kernels.moved(instruction, kernels.everywhere)
        time = None if self.kernel_time is None else self.kernel_time(flops or {}, touched)
        what = instruction.target or instruction.opcode
        label = f"{what} ({instruction.op_name})"
        if time is None:
            if self.has_cycles:
                costs.uncounted.append(f"cycles of {label}")
            return 0.0
        if flops is None:  # the time of its bytes is a lower bound
            costs.uncounted.append(f"FLOPs of {label}")
        skipped = ("jit(<", "jit(step", "jit(run")
        parts = [one for one in instruction.op_name.split("/") if not one.startswith(skipped)]
        add_to(costs.rooflines, {"/".join(parts[-4:]) or what: time})
        return time


def _runs_beside(instruction: Instruction) -> bool:
    """Returns whether an instruction takes no cycles: one of scalars, or a copy by the memory's own
    engine.
    """
    if instruction.opcode.endswith("-start"):
        return True
    arrays = kernels.arrays_of((instruction, *instruction.operands))
    return instruction.opcode not in ("fusion", "custom-call") and not any(
        array.shape for array in arrays
    )


# --------------------------------------------------------------------------------------------------
# Exchanges
# --------------------------------------------------------------------------------------------------


def _sent(collective: Instruction) -> dict[tuple[str, str], float]:
    """Returns the bytes of a collective, by operation and dtype."""
    opcode = collective.opcode.removesuffix("-start")
    if opcode == "all-reduce" and collective.computation.name.startswith("all-reduce-scatter"):
        # A TPU's: a fusion of a sum with the slice that each device keeps of it.
        opcode = "reduce-scatter"
    is_scatter = opcode == "reduce-scatter"
    arrays = kernels.arrays_of(collective.operands) if is_scatter else kernels.produced(collective)
    sent: dict[tuple[str, str], float] = {}
    for array in arrays:
        add_to(sent, {(opcode, array.dtype): array.bytes})
    return sent


def _started(done: Instruction) -> Instruction:
    """Returns the start of an asynchronous instruction from its end."""
    found = done.operands[0]
    while found.opcode.endswith("-update"):
        found = found.operands[0]
    return found


def _channel(collective: Instruction) -> str:
    return collective.attribute(r"channel_id=(\d+)") or collective.name


@functools.lru_cache(maxsize=64)
def _stages(computation: Computation) -> dict[str, list[Instruction]]:
    """Returns the fusions that an exchange on a TPU stands in, from its start to its end, by its
    channel.

    One that runs beside kernels stands in several. Those in a loop that runs between its start and
    its end are none of their own.
    """
    found: dict[str, list[Instruction]] = {}
    for instruction in computation.instructions.values():
        if instruction.opcode == "fusion":
            for one in instruction.unfused():
                if one.opcode in _COLLECTIVES:
                    places = found.setdefault(_channel(one), [])
                    if instruction not in places:
                        places.append(instruction)
    starts = _starts(computation.module)
    return {
        channel: places
        for channel, places in found.items()
        if computation.name in starts.get(channel, (computation.name,))
    }


@functools.lru_cache(maxsize=2)
def _starts(module: Module) -> dict[str, set[str]]:
    """Returns the computations in which exchanges start beside kernels, by channel."""
    found: dict[str, set[str]] = {}
    for instruction in module.instructions.values():
        if instruction.opcode == "fusion" and instruction.name.startswith(_ASYNC_START):
            for one in instruction.unfused():
                if one.opcode in _COLLECTIVES:
                    found.setdefault(_channel(one), set()).add(instruction.computation.name)
    return found


# --------------------------------------------------------------------------------------------------
# Trip counts
# --------------------------------------------------------------------------------------------------


def turns(loop: Instruction) -> int | None:
    """Returns the trip count of a `while`; None where it depends on data.

    It is the compiler's own count where the text has one; else it follows from the counter's start,
    bound and step.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"?(\d+)'):
        return int(known)
    start = loop.operands[0].before_moves()
    compare = _made_inside(loop.called["condition"][0].root)
    if compare.opcode != "compare":
        return None
    counter = _index(compare.operands[0])
    first, bound = (_value(side, start) for side in compare.operands)
    if counter is None or first is None or bound is None:
        return None
    step = _step(loop.called["body"][0], counter, start)
    if not step:
        return None
    direction = compare.attribute(r"direction=(\w+)")
    if direction in ("LT", "GT"):
        return max(0, math.ceil((bound - first) / step))
    if direction in ("LE", "GE"):
        return max(0, math.floor((bound - first) / step) + 1)
    return (bound - first) // step if direction == "NE" and (bound - first) % step == 0 else None


def _made_inside(instruction: Instruction) -> Instruction:
    """Returns the instruction that makes a value, of a fusion the one inside of it."""
    instruction = instruction.before_moves()
    return instruction.fused.root if instruction.opcode == "fusion" else instruction


def _number(instruction: Instruction) -> int | None:
    constant = instruction.before_moves()
    is_integer = constant.opcode == "constant" and re.fullmatch(r"-?\d+", constant.literal)
    return int(constant.literal) if is_integer else None


def _index(instruction: Instruction) -> int | None:
    """Returns the index of a value in the loop's state; None where it is not in it."""
    element = instruction.before_moves()
    is_state = element.opcode == "get-tuple-element" and element.operands[0].opcode == "parameter"
    return element.index if is_state else None


def _value(instruction: Instruction, start: Instruction) -> int | None:
    """Returns a constant, or a number of the state that the loop starts with."""
    index = _index(instruction)
    if index is None:
        return _number(instruction)
    return _number(start.operands[index]) if start.opcode == "tuple" else None


def _step(body: Computation, counter: int, start: Instruction) -> int | None:
    """Returns the step of the loop's counter a turn; None where it can't be read."""
    if body.root.opcode != "tuple":
        return None
    add = _made_inside(body.root.operands[counter])
    if add.opcode not in ("add", "subtract"):
        return None
    total, moves = 0, False
    for position, side in enumerate(add.operands):
        if _index(side) == counter:
            moves = True
        elif (value := _value(side, start)) is None:
            return None
        else:
            total += -value if add.opcode == "subtract" and position else value
    return total if moves else None

"""Memory that a compiled program takes, and the arrays that take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from policy.inspect.hlo.allocations import (
    Allocation,
    ResultPlace,
    StoredValue,
    allocations_of,
    largest_moment,
    last_of,
    live_ranges_of,
)
from policy.inspect.hlo.dump import Dump
from policy.inspect.hlo.makers import Makers
from policy.inspect.hlo.module_paths import operation_in_program, path_in_program
from policy.inspect.hlo.source_frames import SourceFrames
from policy.inspect.hlo.text import HloArray, numpy_name, parse
from policy.programs.paths import Path

# Opcodes that say nothing about what a value is.
_PLAIN = ("fusion", "parameter", "tuple", "get-tuple-element", "while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class HeldBuffer:
    """An array in memory when temporaries take the most of it.

    Attributes:
      bytes: its size on one device, with padding.
      dtype: its dtype, as in "bfloat16".
      shape: on one device.
      kind: "argument", "output" or "temporary".
      path: the module path of the operation that makes it, of a stack of slices that of the slices;
        () of an argument.
      operation: the JAX operation that makes it; or XLA's, as in "copy" or "convert", if XLA adds
        one that moves or converts the module's result; "" of an argument.
      source: the line of the user's code; "" if it is unknown.
      parameter: the number of an argument among those of the compiled program, also of a temporary
        that is an argument converted or copied; None of others.
      label: the name that JAX gave that argument, as in ``params['kernel']``; "" of others.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    path: Path = ()
    operation: str = ""
    source: str = ""
    parameter: int | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device's memory that a run of a compiled program takes.

    Memory of the chip's own, as a TPU's vmem, does not count, nor does the program's code.

    Attributes:
      arguments: bytes of the arguments, those that outputs overwrite included.
      outputs: bytes of the outputs that overwrite no argument.
      temporaries: bytes of the memory for temporaries, gaps between them included.
      constants: bytes of the constants.
      buffers: arguments, outputs, and the temporaries that are alive when these take the most, the
        largest first. Tables of addresses are left out.
    """

    arguments: int
    outputs: int
    temporaries: int
    constants: int
    buffers: tuple[HeldBuffer, ...] = dataclasses.field(repr=False)

    @property
    def total(self) -> int:
        """All bytes."""
        return self.arguments + self.outputs + self.temporaries + self.constants


def memory_of(dump: Dump) -> MemoryUse:
    """Reads the memory of a compiled program, also of one that is too large for its device.

    Module paths are those that were on JAX's name stack when the program was lowered.

    Args:
      dump: of `policy.inspect.hlo.dump.read_dump`.

    Raises:
      ValueError: a text is not of the form that is known.
    """
    allocations = [a for a in allocations_of(dump.allocations) if a.color == 0]
    by_kind: dict[str, list[Allocation]] = {
        kind: [allocation for allocation in allocations if allocation.kind == kind]
        for kind in ("argument", "output", "temporary", "constant")
    }
    argument, output, temporary, constant = (
        sum(allocation.bytes for allocation in found) for found in by_kind.values()
    )
    buffers = _Reader(dump).buffers(by_kind)
    largest_first = tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))
    return MemoryUse(argument, output, temporary, constant, largest_first)


class _Reader:
    def __init__(self, dump: Dump):
        program = parse(dump.program)
        self.makers = Makers(program)
        self.parameters = program.entry.parameters
        self.names = {parameter.name for parameter in self.parameters.values()}
        self.sources = SourceFrames(dump.program)
        self.ranges: Mapping[ResultPlace, tuple[int, int]] = live_ranges_of(dump.live_ranges)

    def buffers(self, by_kind: Mapping[str, list[Allocation]]) -> Iterator[HeldBuffer]:
        for allocation in by_kind["argument"]:
            value = next((v for v in allocation.values if v.place[0] in self.names), None)
            if value is not None and value.array is not None:
                yield self._argument(allocation, value.array)
        for allocation in by_kind["output"]:
            value = last_of(allocation, self.ranges)
            if value is not None and value.array is not None:
                yield self._made(value, value.array, "output", allocation.bytes)
        for value in largest_moment(by_kind["temporary"], self.ranges):
            if value.array is not None:
                yield self._made(value, value.array, "temporary", value.bytes)

    def _argument(self, allocation: Allocation, array: HloArray) -> HeldBuffer:
        return HeldBuffer(
            allocation.bytes,
            numpy_name(array.dtype),
            array.shape,
            "argument",
            parameter=allocation.parameter,
            label=self._label(allocation.parameter),
        )

    def _label(self, number: int | None) -> str:
        parameter = self.parameters.get(-1 if number is None else number)
        if parameter is None or len(parameter.results) != 1:  # or a tuple of all arguments
            return ""
        return parameter.op_name.replace("\\'", "'")

    def _made(self, value: StoredValue, array: HloArray, kind: str, size: int) -> HeldBuffer:
        held = HeldBuffer(size, numpy_name(array.dtype), array.shape, kind)
        maker = self.makers.maker_of(value.place)
        if maker is None:
            return held
        named = maker.instruction
        if named.name in self.names:
            number = int(named.literal)
            return dataclasses.replace(
                held, operation=maker.moving, parameter=number, label=self._label(number)
            )
        own = "" if named.opcode in _PLAIN else named.opcode
        where = maker.stacked or named
        return dataclasses.replace(
            held,
            path=path_in_program(where.op_name),
            operation=maker.moving or operation_in_program(named.op_name) or own,
            source=self.sources.source_of(where),
        )

"""Memory that a compiled program takes, and the arrays that take it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from policy.inspect.hlo.dump import Dump, StoredValue, allocations_of
from policy.inspect.hlo.provenance import (
    Makers,
    SourceFrames,
    operation_in_program,
    path_in_program,
)
from policy.inspect.hlo.text import Computation, HloArray, Instruction, numpy_name, parse
from policy.programs.paths import Path, naming, spelled

# Opcodes that say nothing about what a value is.
_PLAIN = ("fusion", "parameter", "tuple", "get-tuple-element", "while", "conditional", "call")
_LIBRARY = '"__ynn_fusion"'


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One of the largest arrays in a device's memory.

    >>> from policy.inspect.estimate.rows import Buffer
    >>> Buffer(64, "bfloat16", (4, 8), "temporary", "net/head", "dot_general", "net.py:3 (f)").bytes
    64

    Attributes:
      bytes: its size on one device, with padding.
      dtype: its dtype, as in "bfloat16".
      shape: on one device.
      kind: "argument", "output" or "temporary".
      path: the module path of the operation that makes it, of a stack of slices that of the slices;
        or its name, as in ``args[0]['params']['kernel']``, of an argument, also of one that is
        converted or copied; "" if there is none.
      operation: the JAX operation that makes it, as in "dot_general"; or XLA's, as in "copy" or
        "convert", if XLA adds one that moves or converts the module's result; "" of an argument.
      source: the line of the user's code, as "model.py:12 (Net.__call__)"; "" if it is unknown.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    path: str
    operation: str
    source: str


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of a device's memory that a run of a compiled program takes.

    Memory of the chip's own, as a TPU's vmem, does not count, nor does the program's code.

    Attributes:
      arguments: bytes of the arguments, those that outputs overwrite included.
      outputs: bytes of the outputs that overwrite no argument.
      temporaries: bytes of the memory for temporaries, gaps between them included.
      constants: bytes of the constants.
      buffers: the largest of the arguments, the outputs, and the temporaries that share no memory,
        the largest first. Tables of addresses are left out.
    """

    arguments: int
    outputs: int
    temporaries: int
    constants: int
    buffers: tuple[Buffer, ...] = dataclasses.field(repr=False)


def memory_of(dump: Dump, names: Sequence[str] = (), largest: int = 20) -> MemoryUse:
    """Reads the memory of a compiled program, also of one that is too large for its device.

    Module paths are those that were on JAX's name stack when the program was lowered.

    Args:
      dump: of `policy.inspect.hlo.dump.read_dump`.
      names: of the program's arguments.
      largest: the number of buffers to return.

    Raises:
      ValueError: a text is not of the form that is known.
    """
    allocations = allocations_of(dump)
    argument, output, temporary, constant = (
        sum(allocation.bytes for allocation in allocations if allocation.kind == kind)
        for kind in ("argument", "output", "temporary", "constant")
    )
    reader = _Reader(dump, names)
    found: list[tuple[Path | str, Buffer]] = []
    for one in allocations:
        if one.kind == "argument":
            value = next((v for v in one.values if v.place[0] in reader.parameters), None)
            if value is not None and value.array is not None:
                held = _buffer(one.bytes, value.array, "argument")
                found.append((reader.names.get(one.parameter, ""), held))
        values = one.largest() if one.kind == "temporary" else []
        if one.kind == "output":
            returned = [value for value in one.values if value.place[0] in reader.results]
            values = returned[:1] or one.values[-1:]
        for value in values:
            if value.array is not None:
                size = one.bytes if one.kind == "output" else value.bytes
                found.append(reader.made(value, _buffer(size, value.array, one.kind)))
    found = sorted(found, key=lambda each: (-each[1].bytes, each[1].kind))[:largest]
    with naming(path for path, _ in found if isinstance(path, tuple)):
        buffers = tuple(
            dataclasses.replace(held, path=path if isinstance(path, str) else spelled(path))
            for path, held in found
        )
    return MemoryUse(argument, output, temporary, constant, buffers)


def _buffer(size: int, array: HloArray, kind: str) -> Buffer:
    return Buffer(size, numpy_name(array.dtype), array.shape, kind, "", "", "")


class _Reader:
    """Reads what makes a program's values."""

    def __init__(self, dump: Dump, names: Sequence[str]):
        program = parse(dump.program)
        self.makers, self.sources = Makers(program), SourceFrames(dump.program)
        root = program.entry.root
        self.results = {one.name for one in (root, *root.operands)}
        self.parameters = {one.name: i for i, one in program.entry.parameters.items()}
        self.names: dict[int | None, str] = dict(enumerate(names))

    def made(self, value: StoredValue, held: Buffer) -> tuple[Path | str, Buffer]:
        """Returns the path or the argument's name of a value, and its buffer without."""
        maker = self.makers.maker_of(value.place)
        if maker is None:
            return (), held
        named = maker.instruction
        if named.name in self.parameters:
            name = self.names.get(self.parameters[named.name], "")
            return name, dataclasses.replace(held, operation=maker.moving)
        own = "" if named.opcode in _PLAIN else named.opcode
        where = maker.stacked or named
        operation = maker.moving or operation_in_program(named.op_name) or own
        source = self.sources.source_of(where)
        held = dataclasses.replace(held, operation=operation, source=source)
        return path_in_program(where.op_name), held


# --------------------------------------------------------------------------------------------------
# Copies that library kernels make
# --------------------------------------------------------------------------------------------------


def library_scratch(text: str) -> int:
    """Returns the most bytes that a library kernel of a compiled program may allocate, which XLA
    does not plan.

    XLA for processors hands some fusions to YNNPACK, whose kernels allocate copies of what they
    read: the padded input of a convolution, the input of a sum over leading axes, the elementwise
    result that a windowed reduction reads. They free them when they end, so that the largest
    counts. It is an upper bound: kernels that split their work take less. 0 of programs that hand
    no fusion to a library.

    Args:
      text: of ``Compiled.as_text()``.
    """
    if _LIBRARY not in text:
        return 0
    fusions = (
        instruction.fused
        for instruction in parse(text).instructions.values()
        if instruction.opcode == "fusion" and _LIBRARY in instruction.rest
    )
    return int(max((copy for fused in fusions for copy in _copies(fused)), default=0))


def _copies(fused: Computation) -> Iterator[float]:
    """Yields the bytes of the copies that a kernel may make."""
    for instruction in fused.instructions.values():
        read = next(iter(instruction.operands), None)
        if read is None or not read.results:
            continue
        is_sum = instruction.opcode == "reduce" and _is_over_leading_axes(instruction, read)
        if instruction.opcode == "convolution":
            yield _padded_bytes(instruction, read)
        elif is_sum or (instruction.opcode == "reduce-window" and read.opcode != "parameter"):
            yield read.results[0].bytes


def _is_over_leading_axes(reduce: Instruction, read: Instruction) -> bool:
    axes = list(map(int, re.findall(r"\d+", reduce.attribute(r"dimensions=\{([\d,]*)\}"))))
    return 0 in axes and len(read.results[0].shape) - 1 not in axes


def _padded_bytes(convolution: Instruction, read: Instruction) -> float:
    """Returns the bytes of a convolution's input with its padding."""
    array = read.results[0]
    shape, labels = list(array.shape), convolution.attribute(r"dim_labels=(\w+?)_")
    pads = re.findall(r"(-?\d+)_(-?\d+)", convolution.attribute(r"window=\{[^}]*\bpad=(\S+)"))
    for axis, (low, high) in enumerate(pads):
        shape[labels.index(str(axis))] += max(int(low) + int(high), 0)
    return array.bytes * math.prod(shape) / max(math.prod(array.shape), 1)

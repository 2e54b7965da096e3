"""Memory that a processor's library kernels take while they run, which XLA does not plan.

XLA for processors hands some fusions to YNNPACK, whose kernels allocate copies of what they read:
the padded input of a convolution, the input of a sum over leading axes, the elementwise result that
a windowed reduction reads. They free them when they end, so that the largest counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from policy.inspect.hlo.text import Computation, Instruction, parse

_LIBRARY = '"__ynn_fusion"'


def library_scratch(text: str) -> int:
    """Returns the most bytes that a library kernel of a compiled program may allocate.

    It is an upper bound: kernels that split their work take less. 0 of programs that hand no fusion
    to a library.

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
    pads = convolution.attribute(r"window=\{[^}]*\bpad=([\d_x\-]+)")
    labels = convolution.attribute(r"dim_labels=(\w+?)_")
    if not pads or not labels:
        return array.bytes
    added = [sum(map(int, pad.split("_"))) for pad in pads.split("x")]
    spatial = [labels.index(str(i)) for i in range(len(added))]
    shape = list(array.shape)
    for axis, more in zip(spatial, added, strict=True):
        shape[axis] += max(more, 0)
    return array.bytes * math.prod(shape) / max(math.prod(array.shape), 1)

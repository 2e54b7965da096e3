"""FLOPs of a compiled program's kernels, also of those that are opaque to XLA."""

from __future__ import annotations

import math
import re

from policy.inspect.hlo.contractions import Flops, contraction_flops
from policy.inspect.hlo.text import Instruction, numpy_name
from policy.inspect.hlo.traffic import arrays_of

# Custom calls that multiply no matrices: sorts, random bits, TopK, changes of shape or layout, and
# zeros in the padding of an array that a TPU's compiler writes.
_NO_MATMULS = (
    *("__cub$", "cu_threefry", "TopK", "__gpu$TopK", "topk", "xla.gpu.topk", "AllocateBuffer"),
    *("PadToStatic", "SliceToDynamic", "Sharding", "SPMD", "LayoutConstraint", "X64", "ZeroCrop"),
)


def kernel_flops(kernel: Instruction) -> Flops | None:
    """Returns the FLOPs of a kernel's matmuls and convolutions, by the dtype that is multiplied.

    For an opaque kernel they are its author's estimate, or for JAX's splash attention and ragged
    matmuls those of its shapes; their dtype is that of its largest operand.

    Returns:
      None for an opaque kernel of which neither is known.
    """
    found = contraction_flops(kernel)
    if found or kernel.opcode.removesuffix("-start") != "custom-call":
        return found
    flops = _opaque(kernel)
    if flops is None:
        return {} if kernel.target.startswith(_NO_MATMULS) else None
    largest = max(arrays_of(kernel.operands), key=lambda array: array.bytes, default=None)
    return {numpy_name(largest.dtype) if largest else "float32": flops} if flops else {}


def _opaque(kernel: Instruction) -> float | None:
    """Returns the FLOPs of a custom call; None where they are not known.

    For splash attention every pair of a query and a key counts, also in blocks that a mask lets it
    skip.
    """
    if "cost_estimate" in kernel.rest and (estimated := kernel.attribute(r'"flops":"?(\d+)')):
        return float(estimated)
    phase = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", kernel.name)
    arrays = [operand.results[0] for operand in kernel.operands if operand.results]
    if kernel.name.startswith("ragged-dot"):
        rows = [array for array in arrays if len(array.shape) > 1]
        return 2.0 * math.prod(rows[0].shape) * kernel.results[0].shape[-1] if rows else 0.0
    blocks = [array for array in arrays if len(array.shape) >= 3 and array.dtype in ("bf16", "f32")]
    if not phase or len(blocks) < 2:
        return None
    query, key = blocks[:2]
    outputs = [
        array for array in kernel.results if array.dtype == query.dtype and len(array.shape) >= 3
    ]
    width = outputs[0].shape[-1]
    keys = math.prod(key.shape[-2:]) // width  # either axis may be minor, as its block sizes say
    matmuls = {"fwd": 2, "dq": 3, "dkv": 2 + len(outputs)}[
        phase[1]
    ]  # the queries' gradient may be a third output
    return 2.0 * matmuls * math.prod(query.shape) * keys

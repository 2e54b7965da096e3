"""Estimates FLOPs of kernels that are opaque to XLA."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from policy._hlo.text import Instruction


def flops_of(kernel: Instruction, operands: Sequence[Instruction]) -> float | None:
    """Returns the FLOPs of a custom call: its author's estimate, or for JAX's splash attention
    those of its shapes.

    For splash attention every pair of a query and a key counts, also in blocks that a mask lets it
    skip.

    Returns:
      None where neither is known.
    """
    if "cost_estimate" in kernel.rest and (estimated := re.search(r'"flops":"?(\d+)', kernel.rest)):
        return float(estimated[1])
    phase = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", kernel.name)
    arrays = [operand.results[0] for operand in operands if operand.results]
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

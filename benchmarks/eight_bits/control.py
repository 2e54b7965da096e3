"""The control of the benchmark: matmuls in 8 bits whose scales are all 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from policy.core.dtypes import INT8
from policy.core.quantization import Quantized
from policy.eight_bits import quantization


def quantize(
    x: jax.Array, axes: Sequence[int], dtype: np.dtype, scaling: Literal["row", "tensor"] = "row"
) -> Quantized:
    """Acts as `policy.eight_bits.quantization.quantize` where every scale is 1."""
    shared = tuple(range(x.ndim)) if scaling == "tensor" else tuple(axes)
    wide = x.astype(jnp.float32)
    if dtype == INT8:
        codes = jnp.clip(jnp.round(wide), -127, 127)
    else:
        limit = float(jnp.finfo(dtype).max)
        codes = jnp.clip(wide, -limit, limit)
    shape = [1 if axis in shared else size for axis, size in enumerate(x.shape)]
    return Quantized(codes.astype(dtype), jnp.ones(shape, jnp.float32))


@contextlib.contextmanager
def without_scales() -> Iterator[None]:
    """Traces matmuls in 8 bits without scales in a block: operands are clipped and cast.

    All else of their programs is the same. What was traced before the block keeps its scales, so
    that functions under `jax.jit` should be new ones.
    """
    scaled = quantization.quantize
    quantization.quantize = quantize
    try:
        yield
    finally:
        quantization.quantize = scaled

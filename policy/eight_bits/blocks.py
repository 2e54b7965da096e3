"""Arrays with a scale for each block along the contracted axis, and matmuls of them.

Formats are rows of `policy.core.dtypes.BlockFormat`: those of the OCP Microscaling Formats (MX)
Specification v1.0, 2023, section 6.3, and of NVIDIA, "Pretraining Large Language Models with NVFP4"
(arXiv:2509.25149), appendix C.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from policy.core.arrays import alike_varying
from policy.core.dtypes import BlockFormat, backend
from policy.core.quantization import Quantized, codec_of, largest_magnitude
from policy.eight_bits.quantization import rescaled, rounded_up

BlockAxes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Axes of an array: of the batch, of rows, and contracted ones. Each axis is in one of them."""

_MATMUL: Any = (((2,), (2,)), ((0,), (0,)))
_E8M0 = "float8_e8m0fnu"
_LARGEST = float(np.finfo(np.float32).max)


def quantize_in_blocks(
    x: Array, layout: BlockAxes, dtype: np.dtype, blocks: BlockFormat
) -> Quantized:
    """Returns an array as codes (batch, rows, contracted), and scales (batch, rows, blocks).

    Contracted axes are one, in their order, with zeros at its end to a whole number of blocks.
    Elements are rounded to the nearest, and ties to even; those beyond the dtype's largest number
    are clipped. A number that is not finite makes its block NaN, and where the array has a scale
    all of it.

    Args:
      x: floating.
      layout: its axes.
      dtype: of the codes.
      blocks: the format.
    """
    shape = [math.prod(x.shape[axis] for axis in axes) for axes in layout]
    x = jnp.reshape(jnp.transpose(x, sum(layout, ())), shape).astype(jnp.float32)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -shape[2] % blocks.size)))
    x = jnp.reshape(x, (*shape[:2], -1, blocks.size))
    codec, outer = codec_of(dtype), None
    largest = largest_magnitude(x, functools.partial(jnp.max, axis=3, keepdims=True, initial=0))
    if blocks.scale == _E8M0:
        scale, inverse = _powers_of_two(largest, codec.highest, blocks.rounds_up)
    else:
        most = float(jnp.finfo(blocks.scale).max)
        whole = jnp.max(largest, initial=0)
        encode = jnp.minimum(most * codec.highest / whole, _LARGEST)
        outer = jnp.where(jnp.isfinite(whole), 1 / encode, jnp.nan)
        scale = jnp.minimum(largest / codec.highest * encode, most).astype(blocks.scale)
        inverse = jnp.minimum(1 / (scale.astype(jnp.float32) * outer), _LARGEST)
    codes = jnp.reshape(codec.nearest(x * inverse), (*shape[:2], -1))
    # Without it XLA takes the casts out where it widens the codes again.
    codes, scale = map(lax.optimization_barrier, (codes, lax.squeeze(scale, (3,))))
    return Quantized(codes, scale, outer)


def _powers_of_two(largest: Array, limit: float, rounds_up: bool) -> tuple[Array, Array]:
    """Returns scales in float8_e8m0fnu, and their inverses in float32, by the largest magnitudes.

    The exponent is ``floor(log2(largest)) - floor(log2(limit))``, or ``ceil(log2(largest /
    limit))`` if it is rounded up, with the dtype's largest number as limit, and -127 at least.
    """
    exact = rounded_up(largest / limit, 23) if rounds_up else largest
    exponent = lax.bitcast_convert_type(exact, jnp.int32) >> 23  # biased by 127, 255 of NaN
    if not rounds_up:
        exponent = jnp.maximum(exponent - math.floor(math.log2(limit)), 0)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    is_finite = jnp.isfinite(largest)
    codes = jnp.where(is_finite, exponent, 255).astype(jnp.uint8)
    scale = lax.bitcast_convert_type(codes, jnp.dtype(_E8M0))
    return scale, jnp.where(is_finite, inverse, jnp.nan)


def multiply_blocks(lhs: Quantized, rhs: Quantized, dtype: DTypeLike) -> Array:
    """Returns the float32 product (batch, rows of the left, rows of the right) of two operands.

    On GPUs it is cuDNN's where that has it: XLA of jax 0.10.2 compiles `lax.scaled_dot` for several
    of them not at all, and widens float4_e2m1fn. Elsewhere XLA multiplies codes by scales in
    bfloat16, which is exact.

    Args:
      dtype: that the product is rounded to next.
    """
    is_whole = lhs.outer is None and jnp.dtype(dtype) == jnp.bfloat16
    accumulator = jnp.bfloat16 if is_whole else jnp.float32
    if backend()[0] in ("gpu", "cuda"):
        product = jax.nn.scaled_matmul(
            lhs.qvalue, rhs.qvalue, lhs.scale, rhs.scale, preferred_element_type=accumulator
        )
    else:
        product = lax.scaled_dot(
            lhs.qvalue,
            rhs.qvalue,
            lhs_scale=lhs.scale,
            rhs_scale=rhs.scale,
            dimension_numbers=_MATMUL,
            preferred_element_type=accumulator,
        )
    product, *_ = alike_varying(product.astype(jnp.float32), lhs.qvalue, rhs.qvalue)
    if lhs.outer is None or rhs.outer is None:
        return product
    return rescaled(product, lhs.outer, rhs.outer)

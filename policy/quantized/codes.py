"""The codes of numbers, and the numbers of codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.param_formats import CODES, NF4
from policy.core.quantization import largest_magnitude


def quantized(
    x: jax.Array, name: str, axis: int, scale_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of numbers, and their scales: one along `axis`, or for codes from a minimum
    the scale and the minimum.

    Codes are those of the nearest numbers for the rounded scale. The scale of numbers that are not
    finite, too large or too far apart for float32 is NaN.

    Args:
      x: floating.
      name: one of `CODES`.
      axis: the numbers along it share a scale.
      scale_dtype: floating.
    """
    kind, wide = CODES[name], x.astype(jnp.float32)
    widest, largest = float(jnp.finfo(jnp.float32).max), abs(kind.largest)
    # Scales are rounded, and a finite number stays finite in the dtype of `x`.
    below = 1 - float(jnp.finfo(scale_dtype).eps)
    room: Any = min(float(jnp.finfo(x.dtype).max), widest) * below
    limit, minimum = float(jnp.finfo(scale_dtype).max), None
    if kind.has_minimum:
        minimum = jnp.min(wide, axis, keepdims=True)
        minimum = jnp.clip(minimum, -min(room, limit), min(room, limit)).astype(scale_dtype)
        wide = wide - minimum.astype(jnp.float32)
        room = jnp.minimum(room - minimum.astype(jnp.float32), widest * below)
    amax = largest_magnitude(wide, lambda bits: jnp.max(bits, axis, keepdims=True))
    is_held = amax / largest < 2.0**126  # XLA flushes the reciprocals of larger scales to 0
    if kind.largest < 0:  # with the sign of that number
        amax = jnp.where(jnp.min(wide, axis, keepdims=True) == -amax, -amax, amax)
    highest = jnp.minimum(room / largest, limit)
    scale = jnp.clip(amax / kind.largest, -highest, highest)
    scale = jnp.where(is_held, scale, jnp.nan).astype(scale_dtype)
    divisor = scale.astype(jnp.float32)
    codes = in_memory(kind.nearest(wide / jnp.where(divisor == 0, 1, divisor)), name)
    if minimum is None:
        return codes, scale
    return codes, jnp.concatenate([scale, minimum], axis)


def in_memory(codes: jax.Array, name: str) -> jax.Array:
    """Returns codes in the dtype in memory."""
    kind = CODES[name]
    return codes if codes.dtype == kind.stored else lax.bitcast_convert_type(codes, kind.stored)


def numbers(codes: jax.Array, name: str, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the float32 numbers that codes stand for, before they are scaled.

    Args:
      codes: the codes.
      name: one of `CODES`.
      dtype: that the scaled numbers are rounded to. In bfloat16 those of NF4 are rounded to it
        before they are scaled, too: then a polynomial has them.
    """
    kind, table = CODES[name], CODES[name].table
    if kind.stored != kind.dtype:
        codes = lax.bitcast_convert_type(codes, kind.dtype)
    return codes.astype(jnp.float32) if table is None else _looked_up(codes, table, dtype)


def _looked_up(codes: jax.Array, table: tuple[float, ...], dtype: DTypeLike) -> jax.Array:
    """Returns the numbers of 4-bit codes without a lookup, which XLA fuses into no matmul."""
    bits = codes.astype(jnp.int32)
    if jnp.dtype(dtype) == jnp.bfloat16 and table == NF4:
        return _nf4_in_bfloat16(bits)
    numbers: list[Any] = [np.float32(number) for number in table]
    for bit in range(4):
        is_set = bits & (1 << bit) != 0
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        numbers = [jnp.where(is_set, high, low) for low, high in pairs]
    return numbers[0]


def _nf4_in_bfloat16(codes: jax.Array) -> jax.Array:
    """Returns the numbers of NF4 rounded to bfloat16, of int32 codes, in 14 operations.

    NF4 has the quantiles of a distribution that is even, but seven of them below 0 and eight above,
    so they are an odd polynomial of (code - 7) / 7 and (code - 7) / 8. Its coefficients are those
    of a linear program that keeps each value between a number of bfloat16 and the next, at least
    0.07 of their distance away from both; the lower bits are cut off.
    """
    steps = (codes - 7).astype(jnp.float32)
    x = steps * jnp.where(steps > 0, np.float32(0.1033958), np.float32(0.1181844))
    square = x * x
    inner = square * square + np.float32(0.1333839)
    odd = x * ((inner * inner + np.float32(0.2853244)) * square + np.float32(0.7668726))
    upper = lax.bitcast_convert_type(odd, jnp.int32) & np.int32(-(1 << 16))
    return lax.bitcast_convert_type(upper, jnp.float32)

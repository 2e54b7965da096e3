"""The codes of numbers, and the numbers of codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.core.param_formats import KINDS

Array = jax.Array


def quantised(x: Array, name: str, axis: int, scale_dtype: DTypeLike) -> tuple[Array, Array]:
    """Returns the codes of numbers, and their scales, without `axis`.

    Codes are those of the nearest numbers for the rounded scale.

    Args:
      x: floating.
      name: one of `KINDS`.
      axis: the numbers along it share a scale.
      scale_dtype: floating.
    """
    kind, wide = KINDS[name], x.astype(jnp.float32)
    limits = jnp.finfo(scale_dtype)
    amax = jnp.max(jnp.abs(wide), axis, keepdims=True)
    scale = jnp.minimum(amax / kind.largest, float(limits.max)).astype(scale_dtype)
    divisor = scale.astype(jnp.float32)
    unit = wide / jnp.where(divisor == 0, 1, divisor)
    if kind.table is not None:
        table = np.asarray(kind.table, np.float32)
        between = (table[1:] + table[:-1]) / 2
        codes = sum((unit > float(each)).astype(jnp.int32) for each in between)
        codes = jnp.asarray(codes)
    else:
        unit = jnp.clip(unit, -kind.largest, kind.largest)
        codes = jnp.round(unit) if jnp.issubdtype(kind.dtype, jnp.integer) else unit
    return codes.astype(kind.dtype), jnp.squeeze(scale, axis)


def numbers(codes: Array, name: str) -> Array:
    """Returns the float32 numbers that codes stand for, before they are scaled."""
    table = KINDS[name].table
    return codes.astype(jnp.float32) if table is None else _looked_up(codes, table)


def _looked_up(codes: Array, table: tuple[float, ...]) -> Array:
    """Returns the numbers of 4-bit codes, by their bits: XLA fuses selections into a matmul, but
    no lookup.
    """
    bits = codes.astype(jnp.int32)
    found: list[Any] = [np.float32(number) for number in table]
    for bit in range(4):
        is_set = (bits >> bit) & 1 == 1
        found = [
            jnp.where(is_set, high, low) for low, high in zip(found[::2], found[1::2], strict=True)
        ]
    return found[0]

"""Residuals that a scan stacks for the backward pass, encoded in 16 bits beside float32's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.programs.dtypes import F32, is_half
from policy.programs.rewriting.placed_interpreter import PlacedValue

ENCODED = (F32, np.dtype(jnp.bfloat16), np.dtype(jnp.float16))  # stacked by a scan as 16 bits
_IS_ZERO = np.uint16(0x7FC1)  # of a difference: a NaN that no arithmetic returns


def encoded(array: Any, wide: Any) -> Any:
    """Encodes an array that a scan stacks as a residual, beside that of float32, in 16 bits.

    A float32 array is stored as its difference from that of float32 in bfloat16, which is exact to
    one part in 256; zeros are exact. The errors of values that depend on it are known as exactly.
    Half arrays are stored as their bits: backends that compute in float32 would widen them for all
    steps at once.
    """
    if is_half(array.dtype):
        return lax.bitcast_convert_type(array, jnp.uint16)
    difference = jnp.where(array == wide, jnp.zeros((), wide.dtype), array - wide).astype(
        jnp.bfloat16
    )
    bits = lax.bitcast_convert_type(difference, jnp.uint16)
    return jnp.where((array == 0) & (wide != 0), _IS_ZERO, bits)


def decoded(value: PlacedValue) -> PlacedValue:
    if not is_encoded(value):
        return value
    (bits, wide), dtype = value.arrays, value.origin.coded
    array = lax.bitcast_convert_type(bits, dtype if is_half(dtype) else jnp.bfloat16)
    if not is_half(dtype):
        array = jnp.where(array == 0, wide, wide + array.astype(wide.dtype))
        array = jnp.where(bits == _IS_ZERO, jnp.zeros((), wide.dtype), array)
    return PlacedValue([array, wide], dataclasses.replace(value.origin, coded=None))


def is_encoded(value: PlacedValue) -> bool:
    return value.origin is not None and value.origin.coded is not None

"""Decides the dtype of operations on half precision and float32: tables, numbers and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.autocasting.values import CastValue, cast
from policy.programs.dtypes import F32


def fits(constant: Any, dtype: DTypeLike) -> bool:
    """Returns whether a number neither overflows nor vanishes in `dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.asarray(constant).astype(dtype)
    overflows = np.isinf(narrow) and not np.isinf(constant)
    vanishes = narrow == 0 and constant != 0
    return not (overflows or vanishes)


def saturates(constant: Any, dtype: DTypeLike) -> bool:
    """Returns whether a number overflows in `dtype` by rounding alone.

    For example, float32's lowest number becomes -inf in bfloat16.
    """
    finite = bool(np.isfinite(constant)) and has_range_of_float32(dtype)
    return finite and abs(float(constant)) > float(jnp.finfo(dtype).max)


def saturated(array: Any, dtype: DTypeLike) -> Any:
    """Casts `array` to `dtype`, clamped to its finite range."""
    limits = jnp.finfo(dtype)
    return cast(lax.clamp(array.dtype.type(limits.min), array, array.dtype.type(limits.max)), dtype)


def has_range_of_float32(dtype: DTypeLike) -> bool:
    return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(F32).maxexp)


def common_dtype(values: Sequence[CastValue], half: Any, *, selects: bool = False) -> np.dtype:
    """Returns the dtype for mixing float32 values of the trace: `half` or float32.

    It is `half` if one value is half already and every other yields: params and constants always,
    scalars, and weak values of the shape of a half one, if `half` has float32's range. A constant
    that overflows or vanishes in `half` keeps the operation in float32, except in an operation that
    `selects`, where the lowest number of `half` can replace a mask's `finfo(float32).min`.
    """
    shapes = [value.array.shape for value in values if value.dtype == half]
    if not shapes:
        return F32
    for value in values:
        if value.dtype == half:
            continue
        if _is_lost(value, half) and not (selects and saturates(value.constant, half)):
            return F32
        if not (value.yields or (_follows(value, shapes) and has_range_of_float32(half))):
            return F32
    return np.dtype(half)


def meets_tables(values: Sequence[CastValue], half: Any) -> bool:
    """Returns whether half-precision activations meet nothing that widens them.

    These are tables, scalars, and inputs of the shape of an activation. Mixed in float32, they make
    an activation, to be half precision for what reads it.
    """
    shapes = [value.array.shape for value in values if value.dtype == half]
    return bool(shapes) and all(
        value.dtype == half
        or (not _is_lost(value, half) and (_is_table(value) or _follows(value, shapes)))
        for value in values
    )


def makes_table(values: Sequence[CastValue], half: Any) -> bool:
    """Returns whether an operation on float32 values makes a table."""
    return all(_is_table(value) and not _is_lost(value, half) for value in values)


def is_input(values: Sequence[CastValue], half: Any) -> bool:
    """Returns whether an operation shifts or scales inputs of a module's call by tables."""
    return any(value.weak for value in values) and all(
        value.weak or (_is_table(value) and not _is_lost(value, half)) for value in values
    )


def _is_table(value: CastValue) -> bool:
    return value.is_table or value.yields


def _is_lost(value: CastValue, half: Any) -> bool:
    return value.constant is not None and not fits(value.constant, half)


def _follows(value: CastValue, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether a value that is no table follows half-precision ones of some shapes."""
    return value.array.ndim == 0 or (value.weak and value.array.shape in shapes)


def fits_in_range(array: Any, dtype: DTypeLike) -> bool:
    """Returns whether an array is known, and none of its finite numbers overflows in `dtype`.

    Returns False if all of its numbers vanish.
    """
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return False
    numbers = np.abs(np.asarray(array).astype(F32))
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    return not numbers.size or fits(numbers.max(), dtype)

"""Errors counted in units in the last place of a dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def spacing(size: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """The distance between neighbours in `dtype` at magnitudes in float64; below its normal numbers, that of those."""
    info = jnp.finfo(dtype)
    normal = np.maximum(np.abs(np.asarray(size, np.float64)), float(info.smallest_normal))
    return np.exp2(np.floor(np.log2(normal))) * float(info.eps)


def ulps(actual: Any, desired: np.ndarray, dtype: DTypeLike, *, floor: float = 0.0) -> np.ndarray:
    """The error of each number in ulps of `dtype`: ``|actual - desired| / spacing(max(|desired|, floor))``.

    Args:
      actual: floating, of any dtype.
      desired: what is right, in float64.
      dtype: whose ulps.
      floor: the magnitude below which an ulp gets no smaller: a number near zero that came out of a subtraction has no
        digits left in any dtype.

    Returns:
      float64 of the shape of `desired`. An infinity counts as the number after the largest of the dtype, and is right
      where the truth rounds to it. A NaN is right where the truth is one, or rounds to one (as in float8_e4m3fn, which
      has no infinity); it is infinitely wrong elsewhere.
    """
    actual, desired = np.asarray(actual).astype(np.float64), np.asarray(desired, np.float64)
    largest = float(jnp.finfo(dtype).max)
    with np.errstate(all="ignore"):
        rounded = desired.astype(jnp.dtype(dtype)).astype(np.float64)
        after = largest + spacing(np.asarray(largest), dtype)
        reached = np.where(np.isinf(actual), np.copysign(after, actual), actual)
        error = np.abs(reached - desired) / spacing(np.maximum(np.abs(desired), floor), dtype)
        error = np.where(np.isnan(error), np.inf, error)
    is_right = (
        (actual == desired) | ((actual == rounded) & ~np.isfinite(rounded)) | (np.isnan(actual) & np.isnan(rounded))
    )
    return np.where(is_right, 0.0, error)

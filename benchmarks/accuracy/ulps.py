"""The unit that errors are counted in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from policy.inspect.testing import spacing

FLOOR = 2.0**-6  # the share of a row's root mean square below which an ulp gets no smaller


def rounded(y: Any, dtype: Any) -> np.ndarray:
    """`y` in float64; rounded to `dtype` first, so that nobody gains by a wider result."""
    y = np.asarray(y)
    with np.errstate(over="ignore"):
        return y.astype(jnp.dtype(dtype)).astype(np.float64)


def max_ulps(y: Any, truth: np.ndarray, dtype: Any, floor: float = FLOOR) -> float:
    """The largest error of `y` in ulps of `dtype`: |y - truth| / spacing(max(|truth|, floor *
    rms(truth))).

    Near 0 a result that came out of a subtraction has no digits left in any dtype; `floor` keeps
    such elements from being judged by them. It is 0 for functions that do not cancel: there every
    element counts at its own size, down to the smallest normal number of `dtype`.

    Returns:
      inf where `y` is not finite and `truth`, rounded to `dtype`, is.
    """
    y, expected = rounded(y, dtype), rounded(truth, dtype)
    if y.shape != truth.shape:
        raise ValueError(f"The result should be of shape {truth.shape}, but is of shape {y.shape}.")
    size = np.maximum(np.abs(truth), floor * np.sqrt(np.mean(np.square(truth))))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(y - truth) / spacing(size, dtype)
        ulps = np.where(np.isfinite(expected), error, np.where(y == expected, 0.0, np.inf))
    return float(np.max(np.where(np.isnan(ulps), np.inf, ulps)))

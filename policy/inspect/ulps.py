"""Errors counted in units in the last place (ulps) of a dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def spacing(size: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns the spacing of floats of `dtype` at magnitudes `size`, in float64.

    Below the smallest normal number it is the spacing of the subnormal numbers.
    """
    info = jnp.finfo(dtype)
    normal = np.maximum(np.abs(np.asarray(size, np.float64)), float(info.smallest_normal))
    return np.exp2(np.floor(np.log2(normal))) * float(info.eps)


def ulps(actual: Any, desired: np.ndarray, dtype: DTypeLike, *, floor: float = 0.0) -> np.ndarray:
    """Returns the errors in ulps: ``|actual - desired| / spacing(max(|desired|, floor))``.

    Args:
      actual: floating, of any dtype.
      desired: the true values, in float64.
      dtype: the dtype whose ulps are counted.
      floor: the magnitude below which an ulp gets no smaller. A number near zero that results from
        a subtraction has no correct digits left in any dtype.

    Returns:
      float64 of the shape of `desired`. An infinity counts as the number after the largest of the
      dtype, and is right where the truth rounds to it. A NaN is right where the truth is NaN or
      rounds to NaN (as in float8_e4m3fn, which has no infinity); elsewhere its error is infinite.
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
        (actual == desired)
        | ((actual == rounded) & ~np.isfinite(rounded))
        | (np.isnan(actual) & np.isnan(rounded))
    )
    return np.where(is_right, 0.0, error)


def ulp_error_message(
    path: str,
    actual: Any,
    desired: Any,
    allowed: float,
    dtype: DTypeLike | None = None,
    floor: float = 0.0,
) -> str:
    """Returns `policy.testing.assert_close_in_ulps`'s message for one array; "" if close.

    Raises:
      ValueError: the shapes differ.
    """
    leaf, truth = np.asarray(actual), np.asarray(desired)
    if leaf.shape != truth.shape:
        raise ValueError(
            f"{path or 'The array'} should be of shape {truth.shape}, but is of shape {leaf.shape}."
        )
    name = path or "The array"
    if np.iscomplexobj(leaf) or np.iscomplexobj(truth):
        own = dtype or np.real(leaf).dtype
        parts = (("real", np.real(leaf), np.real(truth)), ("imag", np.imag(leaf), np.imag(truth)))
        told = (
            ulp_error_message(f"{name}.{part}", x, y, allowed, own, floor) for part, x, y in parts
        )
        return "\n".join(filter(None, told))
    if dtype is None and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return (
            ""
            if np.array_equal(leaf, truth)
            else f"{name}: {leaf.dtype} numbers should be equal, but are not."
        )
    in_dtype = jnp.dtype(leaf.dtype if dtype is None else dtype)
    error = ulps(leaf, np.asarray(truth, np.float64), in_dtype, floor=floor)
    wrong = int((error > allowed).sum())
    if not wrong:
        return ""
    worst = np.unravel_index(int(error.argmax()), error.shape)
    index = f", at {tuple(map(int, worst))}," if error.ndim else ""
    return (
        f"{name}: {wrong} of {error.size} numbers are off by more than {allowed:g} ulps of "
        f"{in_dtype.name}. The worst{index} is off by {error[worst]:.3g} ulps: got {leaf[worst]}, "
        f"expected {truth[worst]}."
    )

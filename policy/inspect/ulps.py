"""Errors counted in units in the last place (ulps) of a dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
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


def ulps_of(actual: Any, desired: np.ndarray, dtype: DTypeLike, floor: float) -> np.ndarray:
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
    is_right = (actual == desired) | ((actual == rounded) & ~np.isfinite(rounded))
    is_right |= np.isnan(actual) & np.isnan(rounded)
    return np.where(is_right, 0.0, error)


def assert_close_in_ulps(
    actual: Any, desired: Any, ulps: float, dtype: DTypeLike | None = None, *, floor: float = 0.0
) -> None:
    """Asserts that numbers are correct to a number of units in the last place.

    An ulp is the spacing of floats at the magnitude of the true value, in the dtype of `actual`;
    below the smallest normal number it is the spacing of the subnormal ones. An infinity counts as
    the number after the largest. A NaN is right where the truth is NaN, or can't be represented
    otherwise in that dtype.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from policy.inspect.testing import assert_close_in_ulps
    >>> assert_close_in_ulps(jnp.bfloat16(1 / 3), np.float64(1 / 3), 0.5)

    Args:
      actual: an array, or a tree of arrays. Integers and booleans must be equal; complex numbers
        are compared by parts.
      desired: a tree of the same structure and shapes with the true values, preferably in float64.
      ulps: the allowed error in ulps.
      dtype: the dtype whose ulps are counted; by default each array's own.
      floor: the magnitude below which an ulp gets no smaller.

    Raises:
      AssertionError: names the array's path, the number and index of the worst error, and the count
        of wrong numbers.
      ValueError: there is nothing to compare, or the trees or shapes differ.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(actual)
    truths, other = jax.tree.flatten(desired)
    if treedef != other:
        raise ValueError(f"The trees should have one structure, but have {treedef} and {other}.")
    if not leaves:
        raise ValueError("assert_close_in_ulps was given no array: nothing would be asserted.")
    told: list[str] = []
    for (path, leaf), truth in zip(leaves, truths, strict=True):
        told += _messages(jax.tree_util.keystr(path), leaf, truth, ulps, dtype, floor)
    if told:
        raise AssertionError("\n".join(told))


def _messages(
    path: str, actual: Any, desired: Any, allowed: float, dtype: DTypeLike | None, floor: float
) -> Iterator[str]:
    """Yields what is wrong with one array, or with each part of a complex one.

    Raises:
      ValueError: the shapes differ.
    """
    leaf, truth, name = np.asarray(actual), np.asarray(desired), path or "The array"
    if leaf.shape != truth.shape:
        raise ValueError(f"{name} should be of shape {truth.shape}, but is of shape {leaf.shape}.")
    if np.iscomplexobj(leaf) or np.iscomplexobj(truth):
        own = dtype or np.real(leaf).dtype
        for part, of in ("real", np.real), ("imag", np.imag):
            yield from _messages(f"{name}.{part}", of(leaf), of(truth), allowed, own, floor)
        return
    if dtype is None and not jnp.issubdtype(leaf.dtype, jnp.floating):
        if not np.array_equal(leaf, truth):
            yield f"{name}: {leaf.dtype} numbers should be equal, but are not."
        return
    in_dtype = jnp.dtype(leaf.dtype if dtype is None else dtype)
    error = ulps_of(leaf, np.asarray(truth, np.float64), in_dtype, floor)
    wrong = int((error > allowed).sum())
    if wrong:
        worst = np.unravel_index(int(error.argmax()), error.shape)
        index = f", at {tuple(map(int, worst))}," if error.ndim else ""
        yield (
            f"{name}: {wrong} of {error.size} numbers are off by more than {allowed:g} ulps of "
            f"{in_dtype.name}. The worst{index} is off by {error[worst]:.3g} ulps: got "
            f"{leaf[worst]}, expected {truth[worst]}."
        )

"""The largest or smallest element of each window, with a gradient for GPUs.

The gradient goes to the first extremum of each window. XLA for GPUs finds it by a reduction over
positions, which has an int32 array of the output's shape for each axis, and adds up by a scatter.
The one here compares the input with the output again. Its temporaries are boolean, and it adds up
in float32, in a fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import working_dtype
from policy.core.dtypes import backend

Sizes = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]
_MOST_ELEMENTS = 16  # of a window: the gradient has as many terms


def takes(window_shape: Sequence[int]) -> bool:
    """Returns whether programs are traced for a GPU, and windows are small enough."""
    is_small = math.prod(window_shape) <= _MOST_ELEMENTS
    return is_small and backend()[0] in ("gpu", "cuda", "rocm")


def extremum(
    x: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
    *,
    largest: bool,
) -> jax.Array:
    """Returns the largest or smallest element of each window, (batch..., windows..., features).

    Args:
      x: (batch..., window dims..., features), floating; without or with any batch axes.
      window_shape, strides, padding: as in `flax.linen.max_pool`.
      largest: True for maxima, False for minima.

    Returns:
      An array of x's dtype. Its derivative exists forward and backward.
    """
    others = x.ndim - len(window_shape) - 1
    window = (1,) * others + tuple(window_shape) + (1,)
    steps = (1,) * others + tuple(strides or (1,) * len(window_shape)) + (1,)
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape, window, steps, padding)
    else:
        pads = ((0, 0),) * others + tuple(padding) + ((0, 0),)
    return _extremum(x, window, steps, tuple((int(a), int(b)) for a, b in pads), largest)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def _extremum(x: jax.Array, window: Sizes, steps: Sizes, pads: Pads, largest: bool) -> jax.Array:
    init, reduce = _least(x.dtype, largest), lax.max if largest else lax.min
    return lax.reduce_window(x, init, reduce, window, steps, pads)


def _least(dtype: DTypeLike, largest: bool) -> np.ndarray:
    return np.array(-np.inf if largest else np.inf, dtype)


@_extremum.defjvp
def _(
    window: Sizes, steps: Sizes, pads: Pads, largest: bool, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    out = _extremum(*primals, window, steps, pads, largest)
    # The checkpoint keeps x and out for backward, not the comparisons.
    padding = _least(out.dtype, largest)
    first = functools.partial(_at_first, padding=padding, window=window, steps=steps, pads=pads)
    return out, jax.checkpoint(first)(*tangents, *primals, out)


def _at_first(
    t: jax.Array,
    x: jax.Array,
    out: jax.Array,
    *,
    padding: np.ndarray,
    window: Sizes,
    steps: Sizes,
    pads: Pads,
) -> jax.Array:
    """Returns the element of `t` at the first place of each window where `x` equals `out`, or where
    both are NaN.
    """
    ends = [(n - 1) * step + size for n, step, size in zip(out.shape, steps, window, strict=True)]
    config = [(a, end - a - n, 0) for (a, _), end, n in zip(pads, ends, x.shape, strict=True)]
    wide = working_dtype(t.dtype)
    x, t = lax.pad(x, padding, config), lax.pad(t.astype(wide), np.zeros((), wide), config)
    found = jnp.zeros(out.shape, bool)
    total = jnp.zeros(out.shape, t.dtype)
    for start in np.ndindex(*window):
        limits = [
            a + (n - 1) * step + 1 for a, n, step in zip(start, out.shape, steps, strict=True)
        ]
        here, of_here = (lax.slice(whole, start, limits, steps) for whole in (x, t))
        is_first = ((here == out) | (here != here)) & ~found
        total = total + jnp.where(is_first, of_here, jnp.zeros_like(of_here))
        found = found | is_first
    return total.astype(out.dtype)

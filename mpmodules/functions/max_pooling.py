"""The largest or smallest element of each window, with a gradient for GPUs.

The gradient goes to the first extremum of each window. XLA for GPUs finds it by a reduction over
positions, which has an int32 array of the output's shape for each axis, and adds up by a scatter.
The one here compares the input with the output again: its temporary is one int8 array, and it adds
up in reduction_dtype, in a fixed order.
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

from policy.core.dtypes import backend
from policy.core.scope import reduction_dtype_of

Sizes = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]
_MOST_ELEMENTS = 16  # of a window: the gradient has as many terms
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)  # which have infinities


def takes(
    x: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
) -> bool:
    """Returns whether `extremum` takes these arguments, which are those of `flax.linen.max_pool`.

    It is for programs that are traced for a GPU, and for small windows that fit into the input.
    """
    sizes = x.shape[-1 - len(window_shape) : -1]
    pads = [(0, 0)] * len(window_shape) if isinstance(padding, str) else padding
    lengths = {len(sizes), len(window_shape), len(pads), len(strides or window_shape)}
    if len(lengths) > 1 or not all(isinstance(pad, Sequence) and len(pad) == 2 for pad in pads):
        return False  # Flax says what is wrong
    each = zip(sizes, window_shape, pads, strict=True)
    fits = all(isinstance(n, int) and n + sum(pad) >= size for n, size, pad in each)
    is_small = math.prod(window_shape) <= _MOST_ELEMENTS
    is_usual = fits and is_small and x.dtype in _DTYPES
    return is_usual and backend()[0] in ("gpu", "cuda", "rocm")


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
    pads, wide = tuple((int(a), int(b)) for a, b in pads), np.dtype(reduction_dtype_of(x))
    return _extremum(x, window, steps, pads, largest, wide)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4, 5))
def _extremum(
    x: jax.Array, window: Sizes, steps: Sizes, pads: Pads, largest: bool, wide: np.dtype
) -> jax.Array:
    init, reduce = _least(x.dtype, largest), lax.max if largest else lax.min
    return lax.reduce_window(x, init, reduce, window, steps, pads)


def _least(dtype: DTypeLike, largest: bool) -> np.ndarray:
    return np.array(-np.inf if largest else np.inf, dtype)


@_extremum.defjvp
def _(
    window: Sizes,
    steps: Sizes,
    pads: Pads,
    largest: bool,
    wide: np.dtype,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    out = _extremum(*primals, window, steps, pads, largest, wide)
    options = {"padding": _least(out.dtype, largest), "wide": wide}
    first = functools.partial(_at_first, window=window, steps=steps, pads=pads, **options)
    # The checkpoint keeps x and out for backward, not the comparisons.
    return out, jax.checkpoint(first)(*tangents, *primals, out)


def _at_first(
    t: jax.Array,
    x: jax.Array,
    out: jax.Array,
    *,
    padding: np.ndarray,
    wide: np.dtype,
    window: Sizes,
    steps: Sizes,
    pads: Pads,
) -> jax.Array:
    """Returns the element of `t` at the first place of each window where `x` equals `out`, or where
    both are NaN.
    """
    ends = [(n - 1) * step + size for n, step, size in zip(out.shape, steps, window, strict=True)]
    config = [(a, end - a - n, 0) for (a, _), end, n in zip(pads, ends, x.shape, strict=True)]
    x, t = lax.pad(x, padding, config), lax.pad(t.astype(wide), np.zeros((), wide), config)

    def places(whole: jax.Array) -> list[jax.Array]:
        """Returns the elements at each place of the windows."""
        ends = [(n - 1) * step + 1 for n, step in zip(out.shape, steps, strict=True)]
        starts = np.ndindex(*window)
        return [lax.slice(whole, a, np.add(a, ends).tolist(), steps) for a in starts]

    first, is_nan = jnp.zeros(out.shape, jnp.int8), out != out
    for place, here in reversed([*enumerate(places(x))]):
        is_extremum = jnp.where(is_nan, here != here, here == out)
        first = jnp.where(is_extremum, jnp.int8(place), first)
    total = jnp.zeros(out.shape, wide)
    for place, here in enumerate(places(t)):
        total = total + jnp.where(first == place, here, jnp.zeros_like(here))
    return total.astype(out.dtype)

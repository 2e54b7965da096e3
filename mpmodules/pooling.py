"""Pooling for both wings: windows summed in reduction_dtype, whatever the input is, forward and backward.

What backward keeps of a half input is that input, or nothing where the reduction is a sum. In float32 and wider each
function is Flax's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen.pooling as flax_pooling
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.reductions import reduction_dtype, widely

Padding = str | Sequence[tuple[int, int]]


def pool(
    inputs: ArrayLike,
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    padding: Padding,
) -> jax.Array:
    """`flax.linen.pool` in reduction_dtype: each window of `inputs` reduced to one value.

    A maximum or minimum is exact in any dtype and stays in its input's, unless windows overlap: then an input's
    gradient is a sum over windows.

    Args:
      inputs: (batch..., window dims..., features), or without any batch axis. Half in, half out.
      init: what the reduction starts from, a scalar.
      reduce_fn: two scalars to one, such as `jax.lax.add`.
      window_shape: the size of the window along each window dim.
      strides: as many steps between windows; None is one.
      padding: 'SAME', 'VALID', or a (low, high) pair for each window dim.

    Returns:
      (batch..., windows..., features) in the inputs' dtype.
    """
    inputs = jnp.asarray(inputs)

    def run(x: jax.Array, init: Any) -> jax.Array:
        return flax_pooling.pool(x, init, reduce_fn, window_shape, strides, padding)

    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        return run(inputs, init)
    if reduce_fn in (lax.max, lax.min) and _most_windows(window_shape, strides) <= 4:
        return run(inputs, init)
    start = _start(init, reduction_dtype(inputs))
    return widely(lambda x: run(x, start), inputs)


def _most_windows(window_shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """How many windows an input can be in."""
    steps = strides or (1,) * len(window_shape)
    return math.prod(-(-width // step) for step, width in zip(steps, window_shape, strict=False))


def _start(init: Any, dtype: Any) -> Any:
    """The initial value in the dtype of the reduction: concrete where it was, since JAX looks at its value."""
    if not hasattr(init, "dtype"):
        return init
    return init.astype(dtype) if isinstance(init, Tracer) else np.asarray(init).astype(dtype)


def avg_pool(
    inputs: ArrayLike,
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """The mean of each window; `flax.linen.avg_pool` in reduction_dtype. Other arguments as in `pool`.

    Args:
      count_include_pad: whether padding counts as zeros in the mean.

    Returns:
      (batch..., windows..., features) in the inputs' dtype; integers give reduction_dtype.
    """

    def run(x: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # Flax divides by a count of another dtype
            return flax_pooling.avg_pool(x, window_shape, strides, padding, count_include_pad)  # type: ignore[arg-type]

    return widely(run, jnp.asarray(inputs))


def max_pool(
    inputs: ArrayLike,
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """The maximum of each window; arguments as in `pool`. Exact; gradients of overlapping windows are summed wide."""
    return pool(inputs, -jnp.inf, lax.max, window_shape, strides, padding)


def min_pool(
    inputs: ArrayLike,
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """The minimum of each window; arguments as in `pool`. Exact; gradients of overlapping windows are summed wide."""
    return pool(inputs, jnp.inf, lax.min, window_shape, strides, padding)

"""Flax's activations and poolings that half precision breaks, under their names and arguments.

Half in, reduction_dtype inside, half out; the residual is the half input itself, or nothing where
the reduction is a sum. In float32 each is JAX's or Flax's own function, bit for bit where no policy
holds.
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
from jax.typing import ArrayLike, DTypeLike

from mpmodules.functions import max_pooling
from mpmodules.functions.functional import is_half, mixing_allowed
from policy.core.scope import current_policy, reduction_dtype_of
from policy.functions import reductions as half_safe
from policy.functions.reductions import Axis, in_reduction_dtype
from policy.functions.reductions import log_sigmoid as log_sigmoid
from policy.functions.reductions import log_softmax as log_softmax
from policy.functions.reductions import logsumexp as logsumexp
from policy.functions.reductions import softmax as softmax
from policy.functions.reductions import softplus as softplus

Padding = str | Sequence[tuple[int, int]]


def standardize(
    x: ArrayLike,
    axis: Axis = -1,
    mean: ArrayLike | None = None,
    variance: ArrayLike | None = None,
    epsilon: float = 1e-5,
    where: ArrayLike | None = None,
    *,
    algorithm: str | None = None,
) -> jax.Array:
    """Computes (x - mean) / sqrt(variance + epsilon) over `axis` in reduction_dtype.

    Returns the dtype of `x`.

    Under a policy, and for half inputs, a variance that is not given does not cancel where the mean
    is large (`policy.reductions.standardize`). Without a policy, float32 gives the result of
    `jax.nn.standardize`. Other arguments as in `policy.reductions.standardize`.

    Args:
      algorithm: one of `jax.nn.standardize`'s, obeyed where it is given; None is as above.

    Example:
      >>> linen.standardize(jnp.asarray([1.0, 3.0], jnp.bfloat16))
      Array([-1, 1], dtype=bfloat16)
    """
    dtypes = [jnp.result_type(v) for v in (x, mean, variance) if v is not None]
    out = dtypes[0] if jnp.issubdtype(dtypes[0], jnp.inexact) else None
    if algorithm is None and (
        current_policy() is not None or any(is_half(dtype) for dtype in dtypes)
    ):
        return half_safe.standardize(x, axis, mean, variance, epsilon, where, dtype=out)

    def run(x: jax.Array, mean: jax.Array | None, variance: jax.Array | None) -> jax.Array:
        chosen = {} if algorithm is None else {"algorithm": algorithm}
        return jax.nn.standardize(x, axis, mean, variance, epsilon, where, **chosen)

    return in_reduction_dtype(run, x, mean, variance, dtype=out)


def prelu(x: jax.Array, slope: jax.Array) -> jax.Array:
    """Computes x where it is not negative and slope * x elsewhere, in reduction_dtype, rounded once
    to x's dtype.

    Args:
      x: floating, any shape.
      slope: (), any floating dtype. Its gradient is summed over x in reduction_dtype.

    Example:
      >>> reductions.prelu(jnp.asarray([-2.0, 3.0], jnp.bfloat16), jnp.asarray(0.25))
      Array([-0.5, 3], dtype=bfloat16)
    """
    return in_reduction_dtype(
        lambda x, slope: jnp.where(x >= 0, x, slope * x), x, slope, dtype=x.dtype
    )


def pool(
    inputs: ArrayLike,
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    padding: Padding,
) -> jax.Array:
    """Reduces each window of `inputs` to one value; `flax.linen.pool` in reduction_dtype.

    A maximum or minimum is exact in any dtype, but its gradient is a sum over the windows that an
    input is in. Where at most four windows overlap (3x3 with strides of 2), both stay in the
    input's dtype: a sum of four terms rounds three times, by 1.5 ulp of its largest partial sum at
    most. Where more than four windows overlap, both are in reduction_dtype.

    Args:
      inputs: (batch..., window dims..., features), or without any batch axis. Half in, half out.
      init: the initial value of the reduction, a scalar.
      reduce_fn: two scalars to one, such as `jax.lax.add`.
      window_shape: the size of the window along each window dim.
      strides: the step between windows along each window dim; None is one.
      padding: 'SAME', 'VALID', or a (low, high) pair for each window dim.

    Returns:
      (batch..., windows..., features) in the inputs' dtype.

    Example:
      >>> x = jnp.ones((1, 4, 2), jnp.bfloat16)
      >>> linen.pool(x, 0.0, jax.lax.add, (2,), (2,), "VALID").shape
      (1, 2, 2)
    """
    inputs = jnp.asarray(inputs)

    def run(x: jax.Array, init: Any) -> jax.Array:
        return flax_pooling.pool(x, init, reduce_fn, window_shape, strides, padding)

    rounds_little = reduce_fn in (lax.max, lax.min) and _most_windows(window_shape, strides) <= 4
    if rounds_little or not jnp.issubdtype(inputs.dtype, jnp.floating):
        return run(inputs, init)
    start = _start(init, reduction_dtype_of(inputs))
    return in_reduction_dtype(lambda x: run(x, start), inputs)


def _most_windows(window_shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """Returns the largest number of windows that an input can be in."""
    steps = strides or (1,) * len(window_shape)
    return math.prod(-(-width // step) for step, width in zip(steps, window_shape, strict=False))


def _start(init: Any, dtype: DTypeLike) -> Any:
    """Returns the initial value in the reduction's dtype.

    A concrete one stays concrete, since JAX reads its value.
    """
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
    """Averages each window; `flax.linen.avg_pool` in reduction_dtype. Other arguments as in `pool`.

    Args:
      count_include_pad: whether padding counts as zeros in the mean.

    Returns:
      (batch..., windows..., features) in the inputs' dtype; integers give reduction_dtype.

    Example:
      >>> x = jnp.arange(4, dtype=jnp.bfloat16).reshape(1, 4, 1)
      >>> linen.avg_pool(x, (2,), (2,))[0, :, 0]
      Array([0.5, 2.5], dtype=bfloat16)
    """

    def run(x: jax.Array) -> jax.Array:
        with mixing_allowed():  # Flax divides by a count of another dtype
            return flax_pooling.avg_pool(x, window_shape, strides, padding, count_include_pad)  # type: ignore[arg-type]

    return in_reduction_dtype(run, jnp.asarray(inputs))


def max_pool(
    inputs: ArrayLike,
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Returns the maximum of each window, which is exact; arguments as in `pool`.

    Where more than four windows overlap, their gradients are summed in reduction_dtype; so are
    those of windows of at most 16 elements in a program that is traced for a GPU under a policy
    (`mpmodules.functions.max_pooling`). All others are summed in the input's dtype.

    Example:
      >>> x = jnp.arange(4, dtype=jnp.bfloat16).reshape(1, 4, 1)
      >>> linen.max_pool(x, (2,), (2,))[0, :, 0]
      Array([1, 3], dtype=bfloat16)
    """
    return _extremum(inputs, window_shape, strides, padding, largest=True)


def min_pool(
    inputs: ArrayLike,
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Returns the minimum of each window, which is exact; arguments as in `pool`.

    Where more than four windows overlap, their gradients are summed in reduction_dtype; so are
    those of windows of at most 16 elements in a program that is traced for a GPU under a policy
    (`mpmodules.functions.max_pooling`). All others are summed in the input's dtype.

    Example:
      >>> x = jnp.arange(4, dtype=jnp.bfloat16).reshape(1, 4, 1)
      >>> nnx.min_pool(x, (2,), (2,))[0, :, 0]
      Array([0, 2], dtype=bfloat16)
    """
    return _extremum(inputs, window_shape, strides, padding, largest=False)


def _extremum(
    inputs: ArrayLike,
    window_shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    padding: Padding,
    *,
    largest: bool,
) -> jax.Array:
    x = jnp.asarray(inputs)
    # last, as it asks JAX for its devices
    is_ours = current_policy() is not None or is_half(x.dtype)
    if is_ours and max_pooling.takes(x, window_shape, strides, padding):
        return max_pooling.extremum(x, window_shape, strides, padding, largest=largest)
    init, reduce_fn = (-jnp.inf, lax.max) if largest else (jnp.inf, lax.min)
    return pool(x, init, reduce_fn, window_shape, strides, padding)

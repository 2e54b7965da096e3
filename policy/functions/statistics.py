"""Means, variances and sums in reduction_dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from numpy.lib.array_utils import normalize_axis_index

from policy.functions.widening import Axis, in_reduction_dtype, reduction_dtype_of


def mean(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Computes the arithmetic mean over `axis`, summed in reduction_dtype; returns `dtype` or x's.

    Integers give reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> float(reductions.mean(jnp.full(4, 60000, jnp.float16)))
    60000.0

    Args:
      x: any shape.
      axis: the axes to average over; None is all of them.
      dtype: of the result; None is x's.
      keepdims: whether those axes stay, with length 1.
      where: broadcastable to x; False leaves an entry out.

    Returns:
      x's shape without `axis`.
    """
    return in_reduction_dtype(
        lambda x: jnp.mean(x, axis, keepdims=keepdims, where=where), x, dtype=dtype
    )


def var(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Computes the variance over `axis`, in two passes in reduction_dtype.

    Returns `dtype` or x's (real) dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.var(jnp.array([1000.0, 1002.0], jnp.float16))
    Array(1., dtype=float16)

    Args:
      x: floating or complex, any shape.
      axis: the axes of the variance; None is all of them.
      dtype: of the result; None is x's real dtype.
      ddof: is subtracted from the count of elements in the divisor, as in NumPy.
      keepdims: whether those axes stay, with length 1.
      where: broadcastable to x; False leaves an entry out.

    Returns:
      x's shape without `axis`.
    """
    return _spread(jnp.var, x, axis, dtype, ddof=ddof, keepdims=keepdims, where=where)


def std(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Computes the standard deviation over `axis`, in two passes in reduction_dtype.

    Returns `dtype` or x's (real) dtype. Arguments as in `var`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.std(jnp.array([-300.0, 300.0], jnp.float16))
    Array(300., dtype=float16)
    """
    return _spread(jnp.std, x, axis, dtype, ddof=ddof, keepdims=keepdims, where=where)


def _spread(
    function: Callable[..., jax.Array],
    x: ArrayLike,
    axis: Axis,
    dtype: DTypeLike | None,
    **options: Any,
) -> jax.Array:
    own = jnp.result_type(x)
    if dtype is None and jnp.issubdtype(own, jnp.complexfloating):
        dtype = jnp.finfo(own).dtype  # of the real part
    return in_reduction_dtype(lambda x: function(x, axis, **options), x, dtype=dtype)


def standardize(
    x: ArrayLike,
    axis: Axis = -1,
    mean: ArrayLike | None = None,
    variance: ArrayLike | None = None,
    epsilon: float = 1e-5,
    where: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Computes (x - mean) / sqrt(variance + epsilon) over `axis` in reduction_dtype.

    Returns `dtype` or x's.

    A variance that is not given is computed in two passes, unlike `jax.nn.standardize`, whose
    E[x^2] - E[x]^2 cancels where the mean is large.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.standardize(jnp.array([999.0, 1001.0], jnp.float16))
    Array([-1.,  1.], dtype=float16)

    Args:
      x: floating, any shape.
      axis: the axes of the statistics.
      mean, variance: broadcastable to x, or None to compute them over `axis`.
      epsilon: is added to the variance.
      where: broadcastable to x; False leaves an entry out of the statistics.
      dtype: of the result; None is x's.

    Returns:
      x's shape.
    """

    def run(x: jax.Array, mean: jax.Array | None, variance: jax.Array | None) -> jax.Array:
        centre = jnp.mean(x, axis, keepdims=True, where=where) if mean is None else mean
        centred = x - _expanded(centre, x)
        if variance is None:
            spread = jnp.mean(jnp.square(centred), axis, keepdims=True, where=where)
            if mean is not None:  # the variance about the data's own mean, even with another mean
                spread = jnp.var(x, axis, keepdims=True, where=where)
        else:
            spread = variance
        return centred * jax.lax.rsqrt(_expanded(spread, x) + epsilon)

    return in_reduction_dtype(run, x, mean, variance, dtype=dtype)


def _expanded(statistic: jax.Array, x: jax.Array) -> jax.Array:
    """Prepends axes of length 1 to a statistic, to broadcast it without rank promotion."""
    return statistic.reshape((1,) * (x.ndim - statistic.ndim) + statistic.shape)


def cumsum(
    x: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, *, reverse: bool = False
) -> jax.Array:
    """Computes running sums along `axis` (of the flattened array if None) in reduction_dtype.

    Returns `dtype` or x's.

    Integers are summed as integers, exactly, and booleans are counted as in JAX, unless `dtype` is
    floating.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> float(reductions.cumsum(jnp.ones(4096, jnp.float16))[-1])
    4096.0

    Args:
      x: any shape; a scalar counts as (1,).
      axis: the axis to sum along; None flattens x first.
      dtype: of the result; None is x's.
      reverse: whether the sums start at the end.

    Returns:
      x's shape, or (x.size,) without an axis.

    Raises:
      ValueError: x has no such axis.
    """
    return _running(jax.lax.cumsum, x, axis, dtype, reverse)


def cumprod(
    x: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, *, reverse: bool = False
) -> jax.Array:
    """Computes running products along `axis` (of the flattened array if None) in reduction_dtype.

    Returns `dtype` or x's. Integers, and arguments as in `cumsum`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.cumprod(jnp.full(4, 2, jnp.bfloat16))
    Array([2, 4, 8, 16], dtype=bfloat16)
    """
    return _running(jax.lax.cumprod, x, axis, dtype, reverse)


def _running(
    operation: Callable[..., jax.Array],
    x: Any,
    axis: int | None,
    dtype: DTypeLike | None,
    reverse: bool,
) -> jax.Array:
    x = jnp.atleast_1d(jnp.asarray(x))
    x, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    along = normalize_axis_index(along, x.ndim)
    return _exactly_or_in_reduction_dtype(lambda x: operation(x, along, reverse=reverse), x, dtype)


def _exactly_or_in_reduction_dtype(
    function: Callable[[jax.Array], jax.Array], x: Any, dtype: DTypeLike | None
) -> jax.Array:
    """Calls ``in_reduction_dtype(function, x)``; for integers, `function` in an integer dtype."""
    x = jnp.asarray(x)
    counts = not jnp.issubdtype(x.dtype, jnp.inexact) and not (
        dtype and jnp.issubdtype(dtype, jnp.inexact)
    )
    if not counts:
        return in_reduction_dtype(function, x, dtype=dtype)
    wide = dtype or (jnp.dtype(int) if x.dtype == bool else x.dtype)
    return function(x.astype(jax.dtypes.canonicalize_dtype(wide)))


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Sums the rows of `data` by segment in reduction_dtype, without a one-hot matrix.

    Returns `dtype` or data's.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.segment_sum(jnp.ones(4, jnp.float16), jnp.array([0, 1, 1, 1]), 2)
    Array([1., 3.], dtype=float16)

    Args:
      data: (n, ...) floating; integers as in `cumsum`.
      segment_ids: (n,) integers; ids outside of [0, num_segments) are left out.
      num_segments: the number of segments; needed under jit.
      indices_are_sorted, unique_indices, bucket_size, mode: as in `jax.ops.segment_sum`.
      dtype: of the result; None is data's.

    Returns:
      (num_segments, ...).
    """

    def run(data: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(
            data,
            jnp.asarray(segment_ids),
            num_segments,
            indices_are_sorted,
            unique_indices,
            bucket_size,
            mode,
        )

    return _exactly_or_in_reduction_dtype(run, data, dtype)


def global_norm(tree: Any) -> jax.Array:
    """Computes the l2 norm of all floating and complex arrays of a tree together.

    Squares and sums are in reduction_dtype. `optax.global_norm` of 4096 times 300 in float16 is
    inf; this is 19200.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.global_norm({"w": jnp.full(4096, 300, jnp.float16)})
    Array(19200., dtype=float32)

    Returns:
      () in reduction_dtype: float32, or wider if the tree is. 0 for an empty tree.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    wide = reduction_dtype_of(*leaves)
    real = jnp.finfo(wide).dtype

    def sum_of_squares(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jnp.sum(jnp.square(x.real) + jnp.square(x.imag)).astype(real)
        return jnp.sum(jnp.square(x)).astype(real)

    total = jnp.zeros((), real)
    for x in leaves:
        total = total + in_reduction_dtype(sum_of_squares, x, dtype=real)
    nothing = total == 0  # the norm has a corner there; its gradient is taken to be 0
    return jnp.where(nothing, 0, jnp.sqrt(jnp.where(nothing, 1, total)))

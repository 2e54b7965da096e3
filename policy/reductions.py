"""Reductions, and functions around them that half precision breaks: computed in reduction_dtype, returned as they came.

Each one widens its input to reduction_dtype (the policy's in force, else float32; never narrower than the input),
computes there, and rounds once to `dtype`, by default the input's own. What backward keeps of a half input is that
input, and what is as small as a sum, but no float32 copy: the rest is computed again (`policy.checkpointing`), which
XLA fuses into what reads it. In float32 and wider each one is JAX's own function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from policy.casting import is_floating, require_available
from policy.checkpointing import keeping_inputs
from policy.scope import current_policy

Axis = int | Sequence[int] | None


def reduction_dtype(*arrays: ArrayLike) -> np.dtype:
    """Returns the dtype for a reduction of `arrays`: the policy's reduction_dtype, else float32; never narrower."""
    policy = current_policy()
    dtype = jnp.dtype(jnp.float32) if policy is None else require_available(policy.reduction_dtype)
    return _widest([dtype, *(jnp.result_type(x) for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.inexact))])


def widely(function: Callable[..., Any], *arrays: Any, dtype: DTypeLike | None = None) -> Any:
    """``function(*arrays)`` with the arrays in reduction_dtype, and its floating results rounded once to `dtype`.

    Args:
      function: arrays in, a tree of arrays out; pure.
      *arrays: floating arrays of any shapes; integers are widened too, None is handed on.
      dtype: of the results; None is the floating dtype that the arrays have in common, float32 for integers.
    """
    given = [x for x in arrays if x is not None]
    wide = reduction_dtype(*given)
    floating = [jnp.result_type(x) for x in given if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    out = jnp.dtype(dtype) if dtype is not None else _widest(floating) if floating else wide

    def run(*arrays: Any) -> Any:
        results = function(*(None if x is None else _as(x, wide) for x in arrays))
        return jax.tree.map(lambda y: _as(y, out) if jnp.issubdtype(y.dtype, jnp.inexact) else y, results)

    if all(dtype == wide for dtype in floating):
        return run(*arrays)  # nothing was widened: nothing to keep small
    return keeping_inputs(run)(*arrays)


def _widest(dtypes: Sequence[Any]) -> np.dtype:
    with jax.numpy_dtype_promotion("standard"):  # a question about dtypes, not a promotion of anyone's arrays
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))


def _as(x: Any, dtype: DTypeLike) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return x
    return x if x.dtype == dtype and is_floating(x) else x.astype(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Softmax and its relatives
# ---------------------------------------------------------------------------------------------------------------------


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    initial: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """exp(x) / sum(exp(x)) over `axis`; `jax.nn.softmax` in reduction_dtype.

    Args:
      x: floating, any shape.
      axis: what sums to one.
      where: False leaves an entry out; it gets 0.
      initial: taken for the sake of the signature of older versions; not used, as in JAX.
      dtype: of the result; None is x's.

    Returns:
      x's shape. Where `where` leaves no entry, 0.
    """
    del initial
    return widely(lambda x: jax.nn.softmax(x, axis, where=where), x, dtype=dtype)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    initial: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """x - log(sum(exp(x))) over `axis`; `jax.nn.log_softmax` in reduction_dtype. Arguments as in `softmax`."""
    del initial
    return widely(lambda x: jax.nn.log_softmax(x, axis, where=where), x, dtype=dtype)


def logsumexp(
    x: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Any:
    """log(sum(b * exp(x))) over `axis`; `jax.scipy.special.logsumexp` in reduction_dtype.

    Returns:
      x's shape without `axis` (with it as 1 where `keepdims`), in `dtype` or x's; with `return_sign` a pair with the
      sign of the sum. An empty axis gives -inf.
    """

    def run(x: jax.Array, b: jax.Array | None) -> Any:
        return jax.scipy.special.logsumexp(x, axis, b=b, keepdims=keepdims, return_sign=return_sign, where=where)

    return widely(run, x, b, dtype=dtype)


def log_sigmoid(x: ArrayLike, *, dtype: DTypeLike | None = None) -> jax.Array:
    """-log(1 + exp(-x)), elementwise, in reduction_dtype; `dtype` or x's out."""
    return widely(jax.nn.log_sigmoid, x, dtype=dtype)


def softplus(x: ArrayLike, *, dtype: DTypeLike | None = None) -> jax.Array:
    """log(1 + exp(x)), elementwise, in reduction_dtype; `dtype` or x's out."""
    return widely(jax.nn.softplus, x, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics and sums
# ---------------------------------------------------------------------------------------------------------------------


def mean(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """The arithmetic mean over `axis`, summed in reduction_dtype; `dtype` or x's out. Integers give reduction_dtype."""
    return widely(lambda x: jnp.mean(x, axis, keepdims=keepdims, where=where), x, dtype=dtype)


def var(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """The variance over `axis`, in two passes in reduction_dtype; `dtype` or x's (real) out. `ddof` as in NumPy."""

    def run(x: jax.Array) -> jax.Array:
        return jnp.var(x, axis, ddof=ddof, keepdims=keepdims, where=where)

    return widely(run, x, dtype=_real(x) if dtype is None else dtype)


def std(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    ddof: int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """The standard deviation over `axis`, in two passes in reduction_dtype; `dtype` or x's (real) out."""

    def run(x: jax.Array) -> jax.Array:
        return jnp.std(x, axis, ddof=ddof, keepdims=keepdims, where=where)

    return widely(run, x, dtype=_real(x) if dtype is None else dtype)


def _real(x: ArrayLike) -> np.dtype | None:
    """The dtype of the real part of complex numbers; None for others."""
    dtype = jnp.result_type(x)
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else None


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
    """(x - mean) / sqrt(variance + epsilon) over `axis`, in reduction_dtype; `dtype` or x's out.

    Unlike `jax.nn.standardize`, whose E[x^2] - E[x]^2 cancels where the mean is large, a variance that is not given is
    taken in two passes.

    Args:
      x: floating, any shape.
      mean, variance: broadcastable to x, or None to take them over `axis`.
    """

    def run(x: jax.Array, mean: jax.Array | None, variance: jax.Array | None) -> jax.Array:
        centre = jnp.mean(x, axis, keepdims=True, where=where) if mean is None else mean
        centred = x - _expanded(centre, x)
        if variance is None:
            spread = jnp.mean(jnp.square(centred), axis, keepdims=True, where=where)
            if mean is not None:  # the variance about the data's own mean, whatever mean was given
                spread = jnp.var(x, axis, keepdims=True, where=where)
        else:
            spread = variance
        return centred * jax.lax.rsqrt(_expanded(spread, x) + epsilon)

    return widely(run, x, mean, variance, dtype=dtype)


def _expanded(statistic: jax.Array, x: jax.Array) -> jax.Array:
    """A statistic with leading axes of 1, so that it broadcasts against `x` without rank promotion."""
    return statistic.reshape((1,) * (x.ndim - statistic.ndim) + statistic.shape)


def cumsum(
    x: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, *, reverse: bool = False
) -> jax.Array:
    """Running sums along `axis` (of the flattened array where None), in reduction_dtype; `dtype` or x's out.

    Integers are summed as integers, exactly, and booleans counted as JAX counts them, unless `dtype` is a floating one.
    """
    return _running(jax.lax.cumsum, x, axis, dtype, reverse)


def cumprod(
    x: ArrayLike, axis: int | None = None, dtype: DTypeLike | None = None, *, reverse: bool = False
) -> jax.Array:
    """Running products along `axis` (of the flattened array where None), in reduction_dtype; `dtype` or x's out.

    Integers as in `cumsum`.
    """
    return _running(jax.lax.cumprod, x, axis, dtype, reverse)


def _running(operation: Callable[..., jax.Array], x: Any, axis: int | None, dtype: Any, reverse: bool) -> jax.Array:
    x = jnp.atleast_1d(jnp.asarray(x))
    x, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    if not -x.ndim <= along < x.ndim:
        raise ValueError(f"axis should be between {-x.ndim} and {x.ndim - 1} for shape {x.shape}, but got {axis}.")
    return _exactly_or_widely(lambda x: operation(x, along % x.ndim, reverse=reverse), x, dtype)


def _exactly_or_widely(function: Callable[[jax.Array], jax.Array], x: Any, dtype: Any) -> jax.Array:
    """``widely(function, x)``, but of integers in their own dtype, or in the integer one that is asked for."""
    x = jnp.asarray(x)
    counts = not jnp.issubdtype(x.dtype, jnp.inexact) and not (dtype and jnp.issubdtype(dtype, jnp.inexact))
    if not counts:
        return widely(function, x, dtype=dtype)
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
    """Sums the rows of `data` by segment, in reduction_dtype and without a one-hot matrix; `dtype` or data's out.

    Args:
      data: (n, ...) floating; integers as in `cumsum`.
      segment_ids: (n,) integers; ids outside of [0, num_segments) are left out.
      num_segments: how many segments there are; needed under jit.
      indices_are_sorted, unique_indices, bucket_size, mode: as `jax.ops.segment_sum` has them.

    Returns:
      (num_segments, ...).
    """

    def run(data: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(
            data, jnp.asarray(segment_ids), num_segments, indices_are_sorted, unique_indices, bucket_size, mode
        )

    return _exactly_or_widely(run, data, dtype)


def global_norm(tree: Any) -> jax.Array:
    """The l2 norm of all floating and complex arrays of a tree together.

    Squares and sums in reduction_dtype. `optax.global_norm` of 4096 times 300 in float16 is inf; this is 19200.

    Returns:
      () in reduction_dtype: float32, or wider where the tree is. 0 for an empty tree.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    wide = reduction_dtype(*leaves)
    real = jnp.finfo(wide).dtype

    def sum_of_squares(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jnp.sum(jnp.square(x.real) + jnp.square(x.imag)).astype(real)
        return jnp.sum(jnp.square(x)).astype(real)

    total = jnp.zeros((), real)
    for x in leaves:
        total = total + widely(sum_of_squares, x, dtype=real)
    nothing = total == 0  # the norm has a corner there; its gradient is taken to be 0
    return jnp.where(nothing, 0, jnp.sqrt(jnp.where(nothing, 1, total)))

"""Softmax and its relatives in reduction_dtype."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from policy.functions.widening import Axis, in_reduction_dtype


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    initial: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Computes exp(x) / sum(exp(x)) over `axis`: `jax.nn.softmax` in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.softmax(jnp.zeros(4, jnp.bfloat16))
    Array([0.25, 0.25, 0.25, 0.25], dtype=bfloat16)

    Args:
      x: floating, any shape.
      axis: the axes along which the result sums to one.
      where: False leaves an entry out; it gets 0.
      initial: accepted for the signature of older versions; unused, as in JAX.
      dtype: of the result; None is x's.

    Returns:
      x's shape; 0 everywhere if `where` leaves no entry.
    """
    del initial
    return in_reduction_dtype(lambda x: jax.nn.softmax(x, axis, where=where), x, dtype=dtype)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    initial: Any = None,
    *,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Computes x - log(sum(exp(x))) over `axis`: `jax.nn.log_softmax` in reduction_dtype.

    Arguments as in `softmax`.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.log_softmax(jnp.zeros(2, jnp.bfloat16), dtype=jnp.float32)
    Array([-0.6931472, -0.6931472], dtype=float32)

    Returns:
      x's shape; -inf where `where` leaves an entry out.
    """
    del initial
    return in_reduction_dtype(lambda x: jax.nn.log_softmax(x, axis, where=where), x, dtype=dtype)


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
    """Computes log(sum(b * exp(x))) over `axis`: `jax.scipy.special.logsumexp` in reduction_dtype.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> f"{float(reductions.logsumexp(jnp.zeros(4, jnp.bfloat16), dtype=jnp.float32)):.3f}"
    '1.386'

    Args:
      x: floating, any shape.
      axis: the axes to sum over; None is all of them.
      b: factors, broadcastable to x; None is ones.
      keepdims: whether the summed axes stay, with length 1.
      return_sign: whether the sign of the sum is returned too, for sums that may be negative.
      where: False leaves an entry out.
      dtype: of the result; None is x's.

    Returns:
      x's shape without `axis` (with 1 in its place if `keepdims`), in `dtype` or x's; with
      `return_sign` a pair with the sign of the sum. An empty axis gives -inf.
    """

    def run(x: jax.Array, b: jax.Array | None) -> Any:
        return jax.scipy.special.logsumexp(
            x, axis, b=b, keepdims=keepdims, return_sign=return_sign, where=where
        )

    return in_reduction_dtype(run, x, b, dtype=dtype)


def log_sigmoid(x: ArrayLike, *, dtype: DTypeLike | None = None) -> jax.Array:
    """Computes -log(1 + exp(-x)) elementwise in reduction_dtype; returns `dtype` or x's.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.log_sigmoid(jnp.zeros((), jnp.float16), dtype=jnp.float32)
    Array(-0.6931472, dtype=float32)
    """
    return in_reduction_dtype(jax.nn.log_sigmoid, x, dtype=dtype)


def softplus(x: ArrayLike, *, dtype: DTypeLike | None = None) -> jax.Array:
    """Computes log(1 + exp(x)) elementwise in reduction_dtype; returns `dtype` or x's.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.softplus(jnp.float16(20))
    Array(20., dtype=float16)
    """
    return in_reduction_dtype(jax.nn.softplus, x, dtype=dtype)

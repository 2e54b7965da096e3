"""The functions among Flax's activations that half precision breaks, under their names and
arguments there.

Half in, reduction_dtype inside, half out; the residual is the half input itself. In float32 each is
JAX's own function, bit for bit where no policy holds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mpmodules.functions import functional
from policy.core.scope import current_policy
from policy.functions import reductions
from policy.functions.reductions import Axis, in_reduction_dtype
from policy.functions.reductions import log_sigmoid as log_sigmoid
from policy.functions.reductions import log_softmax as log_softmax
from policy.functions.reductions import softmax as softmax
from policy.functions.reductions import softplus as softplus


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> Any:
    """Computes log(sum(b * exp(a))) in reduction_dtype; returns the dtype of `a`.

    Arguments as in `policy.reductions.logsumexp`.

    Example:
      >>> linen.logsumexp(jnp.full((256,), 12.0, jnp.float16))  # exp(12) overflows in half
      Array(17.55, dtype=float16)
    """
    return reductions.logsumexp(a, axis, b, keepdims, return_sign, where)


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
        current_policy() is not None or any(functional.is_half(dtype) for dtype in dtypes)
    ):
        return reductions.standardize(x, axis, mean, variance, epsilon, where, dtype=out)

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
      >>> activations.prelu(jnp.asarray([-2.0, 3.0], jnp.bfloat16), jnp.asarray(0.25))
      Array([-0.5, 3], dtype=bfloat16)
    """
    return in_reduction_dtype(
        lambda x, slope: jnp.where(x >= 0, x, slope * x), x, slope, dtype=x.dtype
    )

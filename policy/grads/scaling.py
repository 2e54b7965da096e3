"""Trees multiplied and divided by a loss scale, in float32 or wider."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from policy.core.arrays import is_inexact, working_dtype
from policy.grads.scaled_gradients import ScaledGradients, require_positive

T = TypeVar("T")


def scale_tree(tree: T, scale: ArrayLike) -> T:
    """Multiplies every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. A traced scale that is not positive and finite makes each floating
    leaf NaN.
    """
    _refuse_scaled(tree, "scale")
    scale = _checked(scale)
    return jax.tree.map(lambda x: _in_working_dtype(jnp.multiply, x, scale), tree)


def unscale_tree(tree: T, scale: ArrayLike) -> T:
    """Divides every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. It divides because the reciprocal of 3 is rounded, and that of 2^127
    is subnormal, which most backends flush to zero. A traced scale that is not positive and finite
    makes each floating leaf NaN.
    """
    _refuse_scaled(tree, "unscale")
    scale = _checked(scale)
    return jax.tree.map(lambda x: _in_working_dtype(jnp.divide, x, scale), tree)


def unscale_by_reciprocal(tree: T, scale: ArrayLike) -> T:
    """Unscales by multiplication: exact for a power of two, otherwise to within an ulp of float32.

    XLA fuses a product into each of its users, but gives a quotient its own kernel and buffer: 10
    bytes an element more in an AdamW step. There are two factors because the reciprocal of 2^127 is
    subnormal, and flushed to zero.
    """
    scale = jnp.asarray(_checked(scale), jnp.float32)
    first = jnp.where(scale > np.float32(2.0**100), np.float32(2.0**-64), np.float32(1))
    second = np.float32(1) / (scale * first)
    return jax.tree.map(
        lambda x: _in_working_dtype(
            jnp.multiply, _in_working_dtype(jnp.multiply, x, first), second
        ),
        tree,
    )


def _checked(scale: ArrayLike) -> ArrayLike:
    """Returns `scale`, or NaN for a traced one that is not positive, which skips the step."""
    is_positive = require_positive(scale)
    if is_positive is True:
        return scale
    return jnp.where(is_positive, scale, jnp.full_like(scale, np.nan))


def _refuse_scaled(tree: Any, what: str) -> None:
    if isinstance(tree, ScaledGradients):
        raise TypeError(
            f"loss_scale.{what} of ScaledGradients is refused: they carry their scale, and a step "
            "divides by it once. Pass them as they are to apply_gradients(tx, params, opt_state, "
            "grads)."
        )


def _in_working_dtype(operation: Any, x: Any, scale: ArrayLike) -> Any:
    if not is_inexact(x):
        return x
    x = jnp.asarray(x)
    x = x.astype(working_dtype(x.dtype))
    is_one = isinstance(scale, int) and scale == 1  # a NoOpLossScale's
    return x if is_one else operation(x, jnp.asarray(scale, x.dtype))

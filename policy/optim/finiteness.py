"""Finiteness of a step's gradients and results, agreed on by all devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from policy.core.trees import working_dtype
from policy.grads.loss_scale import all_finite, all_squares_finite, unscale_by_reciprocal
from policy.optim.clipping import mapped_axes
from policy.optim.gradient_checks import differentiated


def true_gradients(
    gradients: optax.Updates, scale: ArrayLike | None, params: optax.Params
) -> optax.Updates:
    """Returns unscaled gradients in float32, or in the dtype of a param that is wider.

    Args:
      gradients: a tree like the params, in any floating dtypes.
      scale: the scale that they carry, () float32, or None.
      params: the params that they are of.
    """
    params = differentiated(params)
    true = gradients if scale is None else unscale_by_reciprocal(gradients, scale)
    return jax.tree.map(lambda g, p: g.astype(working_dtype(p.dtype)), true, params)


def agreed(flag: jax.Array, gradients: optax.Updates, axis_name: Sequence[Hashable]) -> jax.Array:
    """Returns a () bool: True if the flag is True on every device of the gradients' mapped axes."""
    axes = frozenset().union(*mapped_axes(gradients, axis_name))
    if not axes:
        return flag
    return lax.pmin(flag.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0


def gradients_finite(
    gradients: optax.Updates,
    scale: ArrayLike | None,
    params: optax.Params,
    axis_name: Sequence[Hashable],
) -> jax.Array:
    """Returns a () bool, the same on every device: True if all gradients' squares are finite.

    Gradients with more range than their params are checked in the dtype that they are stepped in.
    """
    like = jax.tree.leaves(differentiated(params))
    if any(_has_more_range(g, p) for g, p in zip(jax.tree.leaves(gradients), like, strict=True)):
        gradients, scale = true_gradients(gradients, scale, params), None
    return agreed(all_squares_finite(gradients, scale), gradients, axis_name)


def stays_finite(before: Any, after: Any) -> jax.Array:
    """Returns a () bool: True if every floating leaf that was finite before is finite after.

    Some of Optax's states hold infinity at first.
    """
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    flags = [all_finite(new) | ~all_finite(old) for old, new in pairs]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def _has_more_range(gradient: jax.Array, param: jax.Array) -> bool:
    return jnp.finfo(gradient.dtype).maxexp > jnp.finfo(working_dtype(param.dtype)).maxexp

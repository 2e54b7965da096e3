"""Gradients of a step: unscaled, their finiteness and norm agreed on by all devices, clipping."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from policy.core.arrays import is_typed, varying_axes, working_dtype
from policy.grads.finiteness import all_finite, all_squares_finite
from policy.grads.scaling import unscale_by_reciprocal


def differentiated(params: Any) -> Any:
    """Returns the params that are differentiated: all, or the fast ones of `optax.lookahead`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def mapped_axes(tree: optax.Updates, axis_name: Sequence[Hashable]) -> list[frozenset[Hashable]]:
    """Returns, for each leaf, the mapped axes over which devices hold different parts of it.

    Inside `jax.shard_map` the type of each leaf says so. Axes that types say nothing about
    (`check_vma=False`, `jax.vmap`) are those of `axis_name`, for every leaf.
    """
    untyped = frozenset(axis for axis in axis_name if not is_typed(axis))
    return [varying_axes(leaf) | untyped for leaf in jax.tree.leaves(tree)]


def gradient_norm(gradients: optax.Updates, axis_name: Sequence[Hashable] = ()) -> jax.Array:
    """Returns the norm of all leaves, () float32, the same on every device.

    Args:
      gradients: a tree of unscaled gradients, float32 or wider.
      axis_name: see `mapped_axes`; squares are summed over them.

    Returns:
      The norm: not finite where a gradient is not, or where squares overflow float32 (norms from
      1.8e19 on).
    """
    squares, axes_of = [], mapped_axes(gradients, axis_name)
    for leaf, axes in zip(jax.tree.leaves(gradients), axes_of, strict=True):
        square = jnp.sum(jnp.square(jnp.abs(leaf))).astype(jnp.float32)
        squares.append(lax.psum(square, tuple(sorted(axes, key=str))) if axes else square)
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.zeros((), jnp.float32)


def clip_to_norm(gradients: optax.Updates, norm: jax.Array, largest: float) -> optax.Updates:
    """Scales gradients down where their norm is above `largest`: g · largest / max(norm, largest).

    Args:
      gradients: a tree of unscaled gradients; dtypes stay.
      norm: their `gradient_norm`, () float32.
      largest: the largest norm that is let through.
    """
    factor = jnp.float32(largest) / jnp.maximum(norm, jnp.float32(largest))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


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

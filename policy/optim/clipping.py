"""Clipping by the global norm, in float32 and across devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax

from policy.core.mapped_axes import is_typed, varying_axes


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

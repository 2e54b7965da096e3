"""Clipping by the global norm, in float32 and across devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.mapped_axes import is_typed, varying_axes


def mapped_axes(tree: Any, axis_name: Sequence[Hashable]) -> list[frozenset[Any]]:
    """For each leaf, the mapped axes over which devices hold different parts of it.

    Inside `jax.shard_map` each leaf's type says so. Of axes that types say nothing about (`check_vma=False`,
    `jax.vmap`), they are those of `axis_name`, for every leaf.
    """
    untyped = frozenset(axis for axis in axis_name if not is_typed(axis))
    return [varying_axes(leaf) | untyped for leaf in jax.tree.leaves(tree)]


def global_norm(gradients: Any, axis_name: Sequence[Hashable] = ()) -> jax.Array:
    """() float32: the norm of all leaves, on every device the same.

    Args:
      gradients: a tree of true gradients, float32 or wider.
      axis_name: see `mapped_axes`; squares are summed over them.

    Returns:
      The norm: not finite where a gradient isn't, or where squares overflow float32 (norms from 1.8e19 on).
    """
    squares = []
    for leaf, axes in zip(jax.tree.leaves(gradients), mapped_axes(gradients, axis_name), strict=True):
        square = jnp.sum(jnp.square(jnp.abs(leaf))).astype(jnp.float32)
        squares.append(lax.psum(square, tuple(sorted(axes, key=str))) if axes else square)
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.zeros((), jnp.float32)


def clip_to_norm(gradients: Any, norm: jax.Array, largest: float) -> Any:
    """Scales gradients of a global norm down where it is above `largest`: g · largest / max(norm, largest)."""
    factor = jnp.float32(largest) / jnp.maximum(norm, jnp.float32(largest))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

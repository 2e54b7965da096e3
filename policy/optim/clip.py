"""Clipping by the global norm, in float32 and across devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.devices import is_typed, varying_axes


def mapped_axes(tree: Any, axis_name: Sequence[Hashable]) -> list[frozenset[Any]]:
    """For each leaf, the mapped axes over which devices hold different parts of it.

    Inside `jax.shard_map` each leaf's type says so. Of axes that types say nothing about (`check_vma=False`,
    `jax.vmap`), they are those of `axis_name`, for every leaf.
    """
    untyped = frozenset(axis for axis in axis_name if not is_typed(axis))
    return [varying_axes(leaf) | untyped for leaf in jax.tree.leaves(tree)]


def clip_by_global_norm(gradients: Any, largest: float, axis_name: Sequence[Hashable] = ()) -> Any:
    """Scales gradients down where their global norm is above `largest`: g · largest / max(norm, largest).

    Args:
      gradients: a tree of true gradients, float32 or wider.
      largest: the largest norm let through.
      axis_name: see `mapped_axes`; squares are summed over them.

    Returns:
      A tree of the same dtypes. Where the squares overflow float32 (norms from 1.8e19 on) gradients become 0.
    """
    squares = []
    for leaf, axes in zip(jax.tree.leaves(gradients), mapped_axes(gradients, axis_name), strict=True):
        square = jnp.sum(jnp.square(jnp.abs(leaf))).astype(jnp.float32)
        squares.append(lax.psum(square, tuple(sorted(axes, key=str))) if axes else square)
    if not squares:
        return gradients
    norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
    factor = jnp.float32(largest) / jnp.maximum(norm, jnp.float32(largest))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

"""Moments between steps: float32 arrays rounded to their storage dtypes, and widened again."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.core.mapped_axes import varying_axes
from policy.core.trees import working_dtype
from policy.optim.blockwise import FORMATS, decode, encode
from policy.optim.rounding import round_stochastically, round_to


class StoredInner(NamedTuple):
    """The state of an inner transform, with moments as they are stored.

    Attributes:
      state: the transform's own state; moments in 8 bits are codes of their shapes.
      scales: a tree like the state, of the scales of 8-bit moments, and an empty
        `optax.MaskedNode` for every other leaf; or one such node if no moment may be in 8 bits.
    """

    state: optax.OptState
    scales: Any


def widen_moments(stored: StoredInner, targets: list[np.dtype | None]) -> optax.OptState:
    """Returns a state whose moments are float32, in which the inner transform computes."""
    leaves, tree = jax.tree.flatten(stored.state)
    each = zip(leaves, scales_of(stored), targets, strict=True)
    return tree.unflatten(x if t is None else _widen(x, s) for x, s, t in each)


def scales_of(stored: StoredInner) -> list[Any]:
    """Returns, for each leaf of the state, its scales or an empty `optax.MaskedNode`."""
    leaves, tree = jax.tree.flatten(stored.state)
    if isinstance(stored.scales, optax.MaskedNode):
        return [optax.MaskedNode()] * len(leaves)
    return tree.flatten_up_to(stored.scales)


def _widen(x: jax.Array, scales: Any) -> jax.Array:
    form = FORMATS.get(np.dtype(x.dtype))
    return x.astype(working_dtype(x.dtype)) if form is None else decode(x, scales, form)


def narrow_moments(
    inner: optax.OptState,
    targets: list[np.dtype | None],
    keys: list[jax.Array | None] | None = None,
    like: StoredInner | None = None,
    *,
    with_scales: bool,
) -> StoredInner:
    """Rounds the moments of a state to the dtypes that they are stored in.

    A finite moment beyond float16 becomes its largest number: an infinite one would stay for good.

    Args:
      inner: a state of an optax transform.
      targets: see `moment_targets`.
      keys: PRNG keys of stochastic rounding, one for each leaf; None rounds to nearest.
      like: the state before. Leaves without a target keep their scales, and where devices that
        hold different parts of a moment share a scale, they compute it together again.
      with_scales: True if a moment may be in 8 bits.
    """
    leaves, tree = jax.tree.flatten(inner)
    draws: list[jax.Array | None] = keys or [None] * len(leaves)
    before = [optax.MaskedNode()] * len(leaves) if like is None else scales_of(like)
    each = zip(leaves, targets, draws, before, strict=True)
    pairs = [(x, old) if t is None else _narrow(x, t, key, old) for x, t, key, old in each]
    scales = tree.unflatten(s for _, s in pairs) if with_scales else optax.MaskedNode()
    return StoredInner(tree.unflatten(x for x, _ in pairs), scales)


def _narrow(x: jax.Array, dtype: np.dtype, key: jax.Array | None, before: Any) -> tuple[Any, Any]:
    form = FORMATS.get(dtype)
    if form is not None:
        shared = frozenset() if _is_empty(before) else varying_axes(x) - varying_axes(before)
        return encode(x.astype(jnp.float32), form, key, tuple(sorted(shared, key=str)))
    if dtype.itemsize >= 4:
        return x.astype(dtype), optax.MaskedNode()
    largest = np.float32(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    rounded = round_to(x, dtype) if key is None else round_stochastically(x, dtype, key)
    return rounded, optax.MaskedNode()


def _is_empty(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)

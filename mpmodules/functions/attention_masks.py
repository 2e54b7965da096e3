"""Attention masks that are known while tracing: their values, or the segment ids that they compare.

A mask that is built under `jax.jit` is a tracer. Its value is read from the equations that made it:
`flax.linen.make_causal_mask`, `make_attention_mask`, `combine_masks`, and `jax.numpy` alike. What
they compute from shapes alone is computed here, in NumPy. A comparison of a traced array along the
queries with one along the keys becomes a pair of segment ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.programs.reading.known_values import Along, Equal, known_terms, with_axes

Array = jax.Array
Shape = tuple[int, ...]

# The ids of padding: a query with the one matches no key, a key with the other no query.
_NO_KEY, _NO_QUERY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1


@dataclasses.dataclass(frozen=True)
class KnownMask:
    """A mask, as the conjunction of two.

    Attributes:
      static: (1 or N, T, S), bool; None keeps all pairs.
      ids: int32, (B..., T) of queries and (B..., S) of keys: a query attends to the keys with its
        own id. Or nothing.
      reflexive: whether each query has the id of the key at its own position.
    """

    static: np.ndarray | None = None
    ids: tuple[Array, ...] = ()
    reflexive: bool = True


def known_mask(mask: Any, query: Array, key: Array) -> KnownMask | None:
    """Reads a mask that broadcasts to (B..., N, T, S).

    Args:
      mask: False (or 0) masks a pair out; an array or a tracer.
      query: (B..., T, N, H).
      key: (B..., S, K, H).

    Returns:
      None where the mask is not known: it is traced and not made of shapes and of comparisons of
      queries' ids with keys', or its known part differs within the batch.
    """
    batch, lengths = query.shape[:-3], (query.shape[-3], key.shape[-3])
    rank = len(batch) + 3
    if np.ndim(mask) > rank:
        return None
    added = rank - np.ndim(mask)
    source = (*[None] * added, *range(np.ndim(mask)))
    terms = tuple(with_axes(term, source) for term in known_terms(mask))
    arrays = [term != 0 for term in terms if isinstance(term, np.ndarray)]
    first = [array[(slice(1),) * len(batch)] for array in arrays]
    segments = _segments([term for term in terms if not isinstance(term, np.ndarray)], rank)
    if segments is None or any((x != one).any() for x, one in zip(arrays, first, strict=True)):
        return None
    allowed = [array.reshape(array.shape[-3:]) for array in first]
    static = None
    if not all(term.all() for term in allowed):
        together = functools.reduce(np.logical_and, allowed)
        static = np.broadcast_to(together, (len(together), *lengths))
    return KnownMask(static, *_ids(segments, batch, lengths))


# --------------------------------------------------------------------------------------------------
# Segment ids
# --------------------------------------------------------------------------------------------------


_Traced = tuple[Sequence[Along], tuple[Sequence[Along], Sequence[Along]]]


def _segments(terms: Sequence[Along | Equal], rank: int) -> _Traced | None:
    """Sorts the traced terms of a mask.

    Returns:
      The ids to compare, those of queries and of keys, or nothing; and the valid queries and the
      valid keys. None where a term is none of these, or two pairs of ids are compared.
    """
    heads, queries, keys = rank - 3, rank - 2, rank - 1
    compared: Sequence[Along] = ()
    padded: tuple[list[Along], list[Along]] = [], []
    for term in terms:
        sides = [term] if isinstance(term, Along) else [term.left, term.right]
        if any(heads in side.used or {queries, keys} <= side.used for side in sides):
            return None
        if isinstance(term, Along):
            padded[keys in term.used].append(term)
            continue
        pair = sides if keys in term.right.used else sides[::-1]
        if queries not in pair[0].used or keys not in pair[1].used:
            return None
        if any(not _is_id(side.array.dtype) for side in pair):
            return None
        if compared and not all(map(_same, compared, pair)):
            return None
        compared = pair
    return compared, padded


def _is_id(dtype: Any) -> bool:
    """Returns whether numbers of a dtype are different in int32 where they are different."""
    return jnp.issubdtype(dtype, np.integer) and dtype.itemsize <= 4


def _same(one: Along, other: Along) -> bool:
    return one.array is other.array and one.axes == other.axes


def _ids(traced: _Traced, batch: Shape, lengths: tuple[int, int]) -> tuple[tuple[Array, ...], bool]:
    """Returns the ids of queries and keys, if any, and whether they are reflexive."""
    compared, padded = traced
    if not compared and not any(padded):
        return (), True
    ids = []
    for side, padding in enumerate((_NO_KEY, _NO_QUERY)):
        place, shape = len(batch) + 1 + side, (*batch, lengths[side])
        found = jnp.ones(shape, jnp.int32)
        if compared:
            found = _spread(compared[side], place, shape).astype(jnp.int32)
        for valid in padded[side]:
            found = jnp.where(_spread(valid, place, shape).astype(bool), found, jnp.int32(padding))
        ids.append(found)
    is_own = lengths[0] == lengths[1] and len({id(side.array) for side in compared}) == 1
    return tuple(ids), is_own and not any(padded)


def _spread(term: Along, place: int, shape: Shape) -> Array:
    """Returns a traced array of queries or keys as (B..., T or S): `place` is their axis."""
    kept = (*range(len(shape) - 1), place)
    axes = [term.axes[at] for at in kept]
    order = [axis for axis in axes if axis is not None]
    dropped = [axis for axis in range(term.array.ndim) if axis not in order]  # of size 1
    moved = jnp.transpose(term.array, (*dropped, *order))
    sizes = [1 if axis is None else term.array.shape[axis] for axis in axes]
    return jnp.broadcast_to(moved.reshape(sizes), shape)

"""Types and buffers of the leaves of a state, which stay the same from step to step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike


def strong_copy(x: ArrayLike) -> jax.Array:
    """Returns a copy of an array in a dtype that is not weak.

    The first update would change a weak type. A buffer that is a param and a state leaf can't be
    donated, and an argument's buffer isn't ours to donate.
    """
    return jnp.array(x, dtype=jnp.result_type(x), copy=True)


def strongly_typed(leaf: jax.Array | float) -> jax.Array:
    """Returns a state leaf in a dtype that is not weak, without a copy where it has one already.

    Python numbers, which `optax.tree_utils.tree_set` puts in from outside, have none.
    """
    if isinstance(leaf, (float, int)):
        is_float = isinstance(leaf, float)
        return jnp.asarray(leaf, jnp.float32 if is_float else jnp.result_type(type(leaf)))
    return lax.convert_element_type(leaf, leaf.dtype) if jax.typeof(leaf).weak_type else leaf


def owned(leaf: ArrayLike, seen: set[int]) -> jax.Array:
    """Returns a state leaf that is strongly typed and shares its buffer with no leaf in `seen`.

    Args:
      leaf: a leaf as an `init` made it.
      seen: identities of params and of leaves before; that of `leaf` is added.
    """
    if not isinstance(leaf, jax.Array) or jax.typeof(leaf).weak_type or id(leaf) in seen:
        return strong_copy(leaf)
    seen.add(id(leaf))
    return leaf


def as_type_of(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns `new` in the dtype of `old`; keys and other extended dtypes as they are."""
    is_extended = jnp.issubdtype(old.dtype, jax.dtypes.extended)
    return new if is_extended else lax.convert_element_type(new, old.dtype)


def incremented(count: jax.Array, by: jax.Array) -> jax.Array:
    """Increments a () int32 counter where a () bool is True; it stays at the largest integer.

    Optax's counters saturate too: one that wrapped around would go on below 0.
    """
    room = count < np.iinfo(np.int32).max
    return count + (room & by).astype(jnp.int32)

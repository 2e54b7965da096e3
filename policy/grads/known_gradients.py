"""Registers gradients, so that a step can detect those that are swapped with the params, and those
of a loss that was not scaled.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import jax

T = TypeVar("T")

# By identity, as arrays have no hash. An entry goes when its array does.
_taken: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_never_scaled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note_gradients(tree: T, *, were_scaled: bool) -> T:
    """Registers the arrays of a tree of gradients, and returns the tree.

    Args:
      were_scaled: whether they were computed with a loss scale.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            _taken[id(leaf)] = leaf
            if not were_scaled:
                _never_scaled[id(leaf)] = leaf
    return tree


def were_never_scaled(gradients: Any) -> bool:
    """Returns whether all arrays of `gradients` are registered as computed without a loss scale."""
    leaves = jax.tree.leaves(gradients)
    return bool(leaves) and all(_never_scaled.get(id(leaf)) is leaf for leaf in leaves)


def are_swapped(params: Any, gradients: Any) -> bool:
    """Returns whether all arrays of `params` are registered gradients, and none of `gradients`."""
    leaves = jax.tree.leaves(params)
    return (
        bool(leaves)
        and all(map(_is_noted, leaves))
        and not any(map(_is_noted, jax.tree.leaves(gradients)))
    )


def _is_noted(leaf: Any) -> bool:
    return _taken.get(id(leaf)) is leaf

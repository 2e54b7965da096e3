"""Transforms, steps and comparisons that the tests of the optimizer share."""

from typing import Any

import jax
import numpy as np
import optax

from policy import NoOpLossScale, apply_gradients, mixed_precision

MODES: list[Any] = ["auto", "full", "remainder", "stochastic", "none"]
RANDOM: list[Any] = ["stochastic"]  # they need a key
BOTH_WAYS: list[Any] = [False, True]  # `apply_gradients`, and optax's own contract


def wrapped(tx: Any = None, policy: Any = "float32", mode: Any = "auto", **options: Any) -> Any:
    """Returns `mixed_precision` around `tx`, or Adam, with a key where the mode needs one."""
    if mode in RANDOM:
        options = {"key": jax.random.key(0), **options}
    options = {"loss_scale": NoOpLossScale(), "master_weights": mode, **options}
    return mixed_precision(optax.adam(0.1) if tx is None else tx, policy, **options)


def _stepped(
    tx: Any, params: Any, state: Any, gradients: Any, through_optax: bool = False, **extra_args: Any
) -> Any:
    if not through_optax:
        return apply_gradients(tx, params, state, gradients, **extra_args)[:2]
    updates, state = tx.update(gradients, state, params, **extra_args)
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates), state


stepped: Any = _stepped  # called with tuples that have no type


def unchanged(params: Any, state: Any) -> Any:
    """Returns what a skipped step leaves as it is."""
    return params, state.inner, state.masters, state.count


def bits(tree: Any) -> list[np.ndarray]:
    """Returns every leaf's bits; those of keys and other extended dtypes as they are."""
    leaves = [np.atleast_1d(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.view(f"u{leaf.dtype.itemsize}") for leaf in leaves]


def types(tree: Any) -> list[Any]:
    return [(x.shape, str(x.dtype), jax.typeof(x).weak_type) for x in jax.tree.leaves(tree)]


def assert_same(found: Any, expected: Any) -> None:
    """Asserts that two trees have the same dtypes and bits, and the same structure."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert dtypes(found) == dtypes(expected)
    for one, other in zip(bits(found), bits(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def dtypes(tree: Any) -> list[str]:
    return [str(leaf.dtype) for leaf in jax.tree.leaves(tree)]

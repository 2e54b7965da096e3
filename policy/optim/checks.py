"""What a step refuses, by name, before anything is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.devices import varying_axes
from policy.gradients import ScaledGradients
from policy.optim.state import MixedPrecisionState
from policy.trees import is_inexact, is_overwritten, leaf_names, path_name, shortened


def check_params(params: Any) -> None:
    """Refuses params that no optimizer can step: by path, each of them.

    Raises:
      ValueError: a leaf is no array, is neither floating nor complex, or is an 8-bit float.
    """
    wrong = [
        f"{path_name(path)} is {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not is_overwritten(path) and not _can_step(leaf)
    ]
    if wrong:
        raise ValueError(
            f"params should be floating arrays of 16 bits or more, but {shortened(wrong)}. Keep such leaves out of "
            "the tree, or mask them: optax.masked(mixed_precision(tx, policy), mask)."
        )


def _can_step(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_inexact(leaf) and np.dtype(leaf.dtype).itemsize >= 2


def check_gradients(gradients: Any, state: Any, params: Any) -> None:
    """Refuses a call of `update` whose arguments don't belong together.

    Raises:
      TypeError: `state` is no MixedPrecisionState, or a ScaledGradients lies inside of the gradients.
      ValueError: `params` are missing; the gradients' tree or shapes are not the params', or they are no numbers, or
        differ between devices where the params don't.
    """
    if not isinstance(state, MixedPrecisionState):
        raise TypeError(f"state should be a MixedPrecisionState, but got {type(state).__name__}.")
    if params is None:
        raise ValueError(
            "params are needed: the step is taken on float32 weights. Call update(gradients, state, params)."
        )
    is_scaled = lambda node: isinstance(node, ScaledGradients)  # noqa: E731
    if any(map(is_scaled, jax.tree.leaves(gradients, is_leaf=is_scaled))):
        raise TypeError("A ScaledGradients should be the whole of the gradients, but one lies inside of their tree.")
    if jax.tree.structure(gradients) != jax.tree.structure(params):
        ours, theirs = leaf_names(params), leaf_names(gradients)
        missing = [name for name in ours if name not in theirs]
        extra = [name for name in theirs if name not in ours]
        raise ValueError(
            "gradients should have the tree of the params. "
            f"Missing: {shortened(missing) or 'nothing'}. Beyond: {shortened(extra) or 'nothing'}. "
            f"Containers: {type(gradients).__name__} for {type(params).__name__}."
        )
    wrong = [
        f"{path_name(path)} is {g.dtype}{list(g.shape)} for {p.dtype}{list(p.shape)}"
        for (path, p), g in zip(
            jax.tree_util.tree_leaves_with_path(params), map(_array, jax.tree.leaves(gradients)), strict=True
        )
        if not is_overwritten(path) and not (g.shape == p.shape and is_inexact(g) and _is_complex(g) <= _is_complex(p))
    ]
    if wrong:
        raise ValueError(
            f"gradients should be floating (complex for complex params only), of the params' shapes, but "
            f"{shortened(wrong)}."
        )
    _check_devices(gradients, params)


def _check_devices(gradients: Any, params: Any) -> None:
    """Refuses gradients that differ between devices where their params are the same on all: those would drift apart."""
    wrong = [
        f"{path_name(path)} over {', '.join(sorted(map(repr, axes)))}"
        for (path, p), g in zip(
            jax.tree_util.tree_leaves_with_path(params), map(_array, jax.tree.leaves(gradients)), strict=True
        )
        if (axes := varying_axes(g) - varying_axes(p))
    ]
    if wrong:
        raise ValueError(
            f"gradients differ between devices where their params don't: {shortened(wrong)}. Reduce them first, "
            "all_reduce(grads, axis, dtype)."
        )


def check_number(name: str, value: Any) -> float:
    """A positive finite Python float, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value < np.inf:
        raise ValueError(f"{name} should be a positive finite number, but got {value!r}.")
    return float(value)


def is_transform(tx: Any) -> bool:
    """Whether `tx` has what optax asks of a gradient transformation."""
    return isinstance(tx, optax.GradientTransformation) or (
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    )


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)

"""Checks that a state belongs to the transform and to the params that it is used with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import KeyPath

from policy.core.trees import leaf_names, path_name, shortened, unboxed
from policy.grads.loss_scale import LossScale
from policy.optim.blockwise import BLOCK, FORMATS, scales_shape
from policy.optim.moments import StoredInner, asked_dtypes, has_codes, moment_targets, scales_of
from policy.optim.state import MixedPrecisionState
from policy.optim.storage_modes import MasterWeights, storage_code, storage_mode, storage_text

_CONVERT = "convert(state, params, to=tx) migrates it"


def require_storage(
    params: optax.Params, state: MixedPrecisionState, master_weights: MasterWeights
) -> jax.Array | Literal[True]:
    """Refuses masters that are stored in another way than `master_weights` stores them.

    Args:
      params: the params, without their overwritten leaves.
      state: the state to check, before its masters are read.
      master_weights: the mode's name, or "auto".

    Returns:
      True, where `state.mode` is concrete and was compared. A traced one gives a () bool: True if
      masters that were restored into this state's tree are of the tree's mode.

    Raises:
      ValueError: the state's mode stores params of these dtypes differently, or its masters were
        saved in another mode; or the tree or the dtypes of params are not those that the state was
        made from.
    """
    dtypes = state.layout.dtypes or [leaf.dtype for leaf in jax.tree.leaves(params)]
    made_by, expected = state.layout.master_weights, storage_code(dtypes, master_weights)
    if storage_code(dtypes, made_by) != expected:
        raise ValueError(
            f"state was made with master_weights={made_by!r} "
            f"({storage_text(storage_code(dtypes, made_by))}), but tx has {master_weights!r} "
            f"({storage_text(expected)}): {_CONVERT}."
        )
    # params that are their own masters are stored alike in every mode
    any_half = any(np.dtype(dtype).itemsize < 4 for dtype in dtypes)
    is_stored = has_mode(state, expected) if any_half else True
    check_tree(params, state)
    _check_dtypes(params, state)
    _check_masters(params, state)
    return is_stored


def has_mode(state: MixedPrecisionState, expected: int) -> jax.Array | Literal[True]:
    """Compares a state's mode with the `expected` storage code.

    Returns:
      True, or for a traced `state.mode` a () bool.

    Raises:
      ValueError: the masters were saved in another mode.
    """
    mode = unboxed(state.mode)
    if isinstance(mode, Tracer) or not _is_readable(mode):
        return jnp.all(mode == jnp.asarray(expected, mode.dtype))
    for saved in np.unique(np.asarray(mode)):
        if saved != expected:
            raise ValueError(
                "state holds masters of another mode: they were saved as "
                f"{storage_text(int(saved))}, and restored into a state of "
                f"master_weights={state.layout.master_weights!r} ({storage_text(expected)}). "
                f"Restore them into a state of the transform that saved them; then {_CONVERT}."
            )
    return True


def _is_readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def check_tree(params: optax.Params, state: MixedPrecisionState) -> None:
    """Refuses params, without overwritten leaves, of another tree than the state was made from.

    Raises:
      ValueError: the trees differ.
    """
    is_empty = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    made_from = jax.tree.structure(state.masters, is_leaf=is_empty)
    if jax.tree.structure(params, is_leaf=is_empty) != made_from:
        masters = jax.tree_util.tree_leaves_with_path(state.masters, is_leaf=is_empty)
        ours = [path_name(path) for path, _ in masters]
        raise ValueError(
            "params should have the tree that the optimizer state was made for. "
            f"{differences(leaf_names(params), ours)} Containers: {type(params).__name__} instead "
            f"of {type(state.masters).__name__}. Pass the params that the optimizer steps, or make "
            "a new state with tx.init(params)."
        )


def differences(names: list[str], expected: list[str]) -> str:
    """Returns the text of the leaves that one tree has and the other has not."""
    missing = [name for name in expected if name not in names]
    extra = [name for name in names if name not in expected]
    return (
        f"Missing: {shortened(missing) or 'nothing'}. Unexpected: {shortened(extra) or 'nothing'}."
    )


def _check_dtypes(params: optax.Params, state: MixedPrecisionState) -> None:
    """Refuses params whose dtypes are not those that the state was made from."""
    pairs = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    names = [(name, np.dtype(leaf.dtype).name) for name, leaf in pairs]
    made_from = state.layout.dtypes or [dtype for _, dtype in names]
    wrong = [
        f"{name} was {before} and is {dtype}"
        for (name, dtype), before in zip(names, made_from, strict=True)
        if dtype != before
    ]
    if wrong:
        raise ValueError(
            "The dtype of params changed since the optimizer state was made: "
            f"{shortened(wrong)}. Cast them back, or call resync(params, state) first."
        )


def _check_masters(params: optax.Params, state: MixedPrecisionState) -> None:
    """Refuses stored arrays of wrong dtypes or shapes: a restored tree may hold any."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    wrong = []
    for (path, p), stored in zip(leaves, tree.flatten_up_to(state.masters), strict=True):
        stored_dtype = storage_mode(p.dtype, state.layout.master_weights).stored_dtype
        expected = "nothing"
        if stored_dtype is not None:
            expected = f"{stored_dtype(np.dtype(p.dtype))}{list(p.shape)}"
        if _shown(stored) != expected:
            wrong.append(f"{path_name(path)} has {_shown(stored)} instead of {expected}")
    if wrong:
        raise ValueError(
            f"state.masters do not fit master_weights={state.layout.master_weights!r} and these "
            f"params: {shortened(wrong)}. Make a state with tx.init(params), or restore the one "
            "that belongs to these params."
        )


def check_inner(
    stored: StoredInner,
    like: optax.OptState,
    params: optax.Params,
    moment_dtypes: Mapping[str, np.dtype] | None,
) -> None:
    """Refuses an inner state that the transform did not make for these params.

    Integers may have any width, and Python numbers pass: hyperparameters are set from outside.

    Args:
      stored: the state to check, and the scales of its moments.
      like: the shapes of the state that the transform makes of float32 params.
      params: the float32 params, or their shapes.
      moment_dtypes: see `get_moment_dtypes`.

    Raises:
      ValueError: the leaves have other names; or a moment or its scales have another dtype or
        shape.
    """
    names, expected = leaf_names(stored.state), leaf_names(like)
    if names != expected:
        raise ValueError(
            "state was made by another transform than tx: use the transform that made it, or make "
            f"a new state with tx.init(params). {differences(names, expected)}"
        )
    dtypes = moment_dtypes or {}
    known = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    targets, asked = moment_targets(like, params, dtypes), asked_dtypes(like, params, dtypes)
    made = jax.tree_util.tree_leaves_with_path(like)
    has_scales = not isinstance(stored.scales, optax.MaskedNode)
    wrong = []
    if has_scales != has_codes(moment_dtypes):
        wrong = [f"moment_scales are {'a tree' if has_scales else 'missing'}"]
    each = zip(made, jax.tree.leaves(stored.state), scales_of(stored), targets, asked, strict=True)
    for (path, one), leaf, scales, target, dtype in each:
        if not _is_of_param(path, one.shape, known):
            continue
        # inside `jax.shard_map` a leaf too small for 8 bits may be a part of a larger one
        is_coded = dtype in FORMATS and getattr(leaf, "dtype", None) == dtype
        needed = dtype if is_coded else target or one.dtype
        if jnp.shape(leaf) != one.shape or _is_other_dtype(leaf, needed):
            needed = f"{needed}{list(one.shape)}"
            wrong.append(f"{path_name(path)} is {_shown(leaf)} instead of {needed}")
        needed = f"float32{list(scales_shape(leaf.shape))}" if is_coded else "nothing"
        if _shown(scales) != needed:
            wrong.append(
                f"the scales of {path_name(path)} are {_shown(scales)} instead of {needed}"
            )
    if wrong:
        raise ValueError(
            f"state holds other arrays than tx stores for these params: {shortened(wrong)}. Pass "
            "the moment_dtype, or Optax's own mu_dtype, that the state was made with, or "
            f"{_CONVERT}. For params of other shapes make a state with tx.init(params). Inside "
            f"jax.shard_map, shards of the last axis of 8-bit moments are multiples of {BLOCK} "
            "long: otherwise replicate that axis."
        )


def _is_of_param(
    path: KeyPath, shape: tuple[int, ...], params: dict[KeyPath, tuple[int, ...]]
) -> bool:
    """Returns whether a leaf's path ends in a param's.

    Params that are one array have no path: then leaves of its shape belong to it.
    """
    if any(getattr(key, "name", None) == "hyperparams" for key in path):
        return False
    return any(path[start:] in params for start in range(len(path))) or params.get(()) == shape


def _is_other_dtype(leaf: Any, expected: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype == expected:
        return False
    return dtype in FORMATS or expected in FORMATS or jnp.issubdtype(dtype, jnp.inexact)


def _shown(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else "nothing"


def check_loss_scale(saved: LossScale, of_tx: LossScale) -> None:
    """Refuses a state whose loss scale is of another kind than the transform's.

    Raises:
      ValueError: the kinds differ.
    """
    if type(saved) is not type(of_tx):
        raise ValueError(
            f"state has a {type(saved).__name__}, but tx was made with a {type(of_tx).__name__}: "
            f"make tx with the loss_scale of the state, or {_CONVERT}."
        )

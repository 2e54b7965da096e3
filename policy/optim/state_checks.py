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

from policy.core.arrays import is_inexact, leaf_names, path_name, unboxed
from policy.core.messages import dtype_and_shape, shortened
from policy.grads.loss_scale import LossScale
from policy.optim.blockwise import BLOCK, FORMATS, scales_shape
from policy.optim.checks import differences
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
    leaves, tree = jax.tree.flatten(params)
    stored = tree.flatten_up_to(state.masters)
    each = zip(leaf_names(params), leaves, dtypes, stored, strict=True)
    wrong = [
        f"{name} was {np.dtype(before)}{list(jnp.shape(p if is_empty(kept) else kept))} and is "
        f"{dtype_and_shape(p)}"
        for name, p, before, kept in each
        if p.dtype != before or not (is_empty(kept) or jnp.shape(kept) == p.shape)
    ]
    if wrong:
        raise ValueError(
            "params changed since the optimizer state was made: "
            f"{shortened(wrong)}. Cast them back, or call resync(params, state) first."
        )
    _check_masters(params, stored, made_by)
    return is_stored


def _check_masters(params: optax.Params, stored: list[Any], made_by: MasterWeights) -> None:
    """Refuses stored arrays of other dtypes: a tree that was restored may hold any."""
    wrong = []
    for name, p, kept in zip(leaf_names(params), jax.tree.leaves(params), stored, strict=True):
        stored_dtype = storage_mode(p.dtype, made_by).stored_dtype
        needed = None if stored_dtype is None else stored_dtype(np.dtype(p.dtype))
        if getattr(kept, "dtype", None) != needed:
            wrong.append(f"{name} is {dtype_and_shape(kept)} instead of {needed or 'nothing'}")
    if wrong:
        raise ValueError(
            f"state.masters do not fit master_weights={made_by!r} and these params: "
            f"{shortened(wrong)}. Make a state with tx.init(params), or restore the one that "
            "belongs to these params."
        )


def is_empty(node: Any) -> bool:
    """Returns whether a node stands for nothing, beside a param without a stored array."""
    return isinstance(node, optax.MaskedNode)


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
    tree, made_from = (jax.tree.structure(x, is_leaf=is_empty) for x in (params, state.masters))
    if tree != made_from:
        ours = leaf_names(made_from.unflatten(range(made_from.num_leaves)))
        raise ValueError(
            "params should have the tree that the optimizer state was made for. "
            f"{differences(leaf_names(params), ours)} Containers: {type(params).__name__} instead "
            f"of {type(state.masters).__name__}. Pass the params that the optimizer steps, or make "
            "a new state with tx.init(params)."
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
    each = zip(made, jax.tree.leaves(stored.state), scales_of(stored), targets, asked, strict=True)
    is_tree = not isinstance(stored.scales, optax.MaskedNode)
    kind = type(stored.scales).__name__
    wrong = [] if is_tree == has_codes(dtypes) else [f"moment_scales are {kind}"]
    for (path, one), leaf, scales, target, dtype in each:
        if not (_is_of_param(path, one.shape, known) and is_inexact(one)):
            continue
        # inside `jax.shard_map` a leaf too small for 8 bits may be a part of a larger one
        is_coded = dtype in FORMATS and leaf.dtype == dtype
        needed = f"{dtype if is_coded else target or one.dtype}{list(one.shape)}"
        of_scales = f"float32{list(scales_shape(one.shape))}" if is_coded else "MaskedNode"
        wrong += [
            f"{name} {dtype_and_shape(x)} instead of {text}"
            for name, x, text in (
                (f"{path_name(path)} is", leaf, needed),
                (f"the scales of {path_name(path)} are", scales, of_scales),
            )
            if dtype_and_shape(x) != text
        ]
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

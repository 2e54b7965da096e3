"""Checks that a state belongs to the transform and to the params that it is used with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import KeyPath

from policy.core.trees import leaf_names, path_name, shortened, unboxed
from policy.grads.loss_scale import LossScale
from policy.optim.blockwise import BLOCK, FORMATS, scales_shape
from policy.optim.moment_storage import StoredInner, scales_of
from policy.optim.moments import asked_dtypes, has_codes, moment_targets
from policy.optim.state import Layout, MixedPrecisionState
from policy.optim.storage_code import storage_code, storage_text
from policy.optim.storage_modes import MasterWeights, storage_mode
from policy.optim.transform_names import optimizer_name

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
    check_layout(params, state)
    _check_stored(params, state)
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
        ours, theirs = [path_name(path) for path, _ in masters], leaf_names(params)
        missing = [name for name in ours if name not in theirs]
        extra = [name for name in theirs if name not in ours]
        raise ValueError(
            "params should have the tree that the optimizer state was made for. "
            f"Missing: {shortened(missing) or 'nothing'}. Unexpected: "
            f"{shortened(extra) or 'nothing'}. Containers: {type(params).__name__} instead of "
            f"{type(state.masters).__name__}. Pass the params that the optimizer steps, or make a "
            "new state with tx.init(params)."
        )


def check_layout(params: optax.Params, state: MixedPrecisionState) -> None:
    """Refuses params, without overwritten leaves, whose dtypes the state was not made from.

    Raises:
      ValueError: the trees or dtypes differ.
    """
    check_tree(params, state)
    if state.layout.dtypes is None:
        return
    wrong = [
        f"{name} was {before} and is {leaf.dtype}"
        for name, leaf, before in zip(
            leaf_names(params), jax.tree.leaves(params), state.layout.dtypes, strict=True
        )
        if np.dtype(leaf.dtype).name != before
    ]
    if wrong:
        raise ValueError(
            "The dtype of params changed since the optimizer state was made: "
            f"{shortened(wrong)}. Cast them back, or call resync(params, state) first."
        )


def _check_stored(params: optax.Params, state: MixedPrecisionState) -> None:
    """Refuses stored arrays of wrong dtypes or shapes: a restored tree may hold any."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    wrong = []
    for (path, p), stored in zip(leaves, tree.flatten_up_to(state.masters), strict=True):
        stored_dtype = storage_mode(p.dtype, state.layout.master_weights).stored_dtype
        dtype = None if stored_dtype is None else stored_dtype(np.dtype(p.dtype))
        found = (stored.dtype, stored.shape) if hasattr(stored, "dtype") else None
        if found != (None if dtype is None else (dtype, p.shape)):
            shown = "nothing" if found is None else f"{found[0]}{list(found[1])}"
            expected = "nothing" if dtype is None else f"{dtype}{list(p.shape)}"
            wrong.append(f"{path_name(path)} has {shown} instead of {expected}")
    if wrong:
        raise ValueError(
            f"state.masters do not fit master_weights={state.layout.master_weights!r} and these "
            f"params: {shortened(wrong)}. Make a state with tx.init(params), or restore the one "
            "that belongs to these params."
        )


class LeafLike(NamedTuple):
    """A leaf of an inner state.

    Attributes:
      name: its path, as messages show it.
      shape: its shape.
      dtype: the dtype that it is stored in; None for leaves that are no arrays.
      is_of_param: True if it belongs to one param.
      codes: the dtype of its codes if its field is stored in 8 bits, also where it is too small for
        that by itself: inside `jax.shard_map` it may be a part of a larger moment.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    is_of_param: bool
    codes: np.dtype | None = None


@dataclasses.dataclass(frozen=True)
class InnerLike:
    """The leaves of an inner state, as a transform makes it and a `MixedPrecision` stores it."""

    leaves: tuple[LeafLike, ...]

    @classmethod
    def of(
        cls,
        inner: optax.OptState,
        params: optax.Params,
        moment_dtypes: Mapping[str, np.dtype] | None,
    ) -> InnerLike:
        """Describes an inner state that was just made, before or after moments are narrowed."""
        known = jax.tree_util.tree_leaves_with_path(params)
        shapes = {path: tuple(leaf.shape) for path, leaf in known}
        leaves = jax.tree_util.tree_leaves_with_path(inner)
        targets: list[np.dtype | None] = [None] * len(leaves)
        asked = targets
        if moment_dtypes is not None:
            targets = moment_targets(inner, params, moment_dtypes)
            asked = asked_dtypes(inner, params, moment_dtypes)
        return cls(
            tuple(
                LeafLike(
                    path_name(path),
                    tuple(jnp.shape(leaf)),
                    getattr(leaf, "dtype", None) if target is None else target,
                    _is_of_param(path, tuple(jnp.shape(leaf)), shapes),
                    dtype if dtype in FORMATS else None,
                )
                for (path, leaf), target, dtype in zip(leaves, targets, asked, strict=True)
            )
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


def check_inner(
    stored: StoredInner,
    like: InnerLike | None,
    layout: Layout,
    tx: optax.GradientTransformation,
    moment_dtypes: Mapping[str, np.dtype] | None,
) -> None:
    """Refuses an inner state that the transform did not make for these params.

    Integers may have any width, and Python numbers pass: hyperparameters are set from outside.

    Args:
      stored: the state to check, and the scales of its moments.
      like: the leaves that the transform makes; None compares names only.
      layout: the layout of the whole state.
      tx: the transform.
      moment_dtypes: see `get_moment_dtypes`.

    Raises:
      ValueError: another transform made it; or a moment or its scales have another dtype or shape.
    """
    inner = stored.state
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(inner)]
    expected = names if like is None else [leaf.name for leaf in like.leaves]
    optimizer = optimizer_name(tx, inner if names == expected else None)
    text = (
        f"state was made by {layout.optimizer}, but tx is {optimizer}: use the transform that made "
        "it, or make a new state with tx.init(params)."
    )
    if names != expected:
        missing = [name for name in expected if name not in names]
        extra = [name for name in names if name not in expected]
        raise ValueError(
            f"{text} Leaves missing in the state: {shortened(missing) or 'none'}; unexpected: "
            f"{shortened(extra) or 'none'}."
        )
    if layout.optimizer != optimizer:
        raise ValueError(
            f"{text} If both names are of the same optimizer, convert(state, params, to=tx) keeps "
            "its moments."
        )
    if like is None:
        return
    shapes, dtypes = [], []
    for leaf, expected in zip(jax.tree.leaves(inner), like.leaves, strict=True):
        if not expected.is_of_param:
            continue
        if jnp.shape(leaf) != expected.shape:
            found = tuple(jnp.shape(leaf))
            shapes.append(f"{expected.name} is {found} instead of {expected.shape}")
        if _is_other_dtype(leaf, expected):
            dtypes.append(f"{expected.name} is {leaf.dtype} instead of {expected.dtype}")
    if shapes:
        raise ValueError(
            f"state was made for params of other shapes: {shortened(shapes)}. Make one with "
            "tx.init(params)."
        )
    if dtypes:
        pairs = (moment_dtypes or {}).items()
        asked = {name or "first moments": str(dtype) for name, dtype in pairs} or None
        raise ValueError(
            f"state holds moments in other dtypes than moment_dtype={asked} stores: "
            f"{shortened(dtypes)}. Pass the moment_dtype, or Optax's own mu_dtype, that the state "
            f"was made with, or {_CONVERT}."
        )
    _check_scales(stored, like, has_codes(moment_dtypes))


def _is_other_dtype(leaf: Any, expected: LeafLike) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or expected.dtype is None or dtype in (expected.dtype, expected.codes):
        return False
    is_code = dtype in FORMATS or expected.dtype in FORMATS
    return is_code or jnp.issubdtype(dtype, jnp.inexact)


def _check_scales(stored: StoredInner, like: InnerLike, expects_codes: bool) -> None:
    """Refuses scales that are not those of the moments beside them."""
    if isinstance(stored.scales, optax.MaskedNode) == expects_codes:
        found, asked = ("without", "them") if expects_codes else ("with", "none")
        raise ValueError(
            f"state was made {found} moments in 8 bits, but moment_dtype asks for {asked}: "
            f"{_CONVERT}."
        )
    wrong = []
    each = zip(like.leaves, jax.tree.leaves(stored.state), scales_of(stored), strict=True)
    for expected, leaf, scales in each:
        has_scales = expected.codes is not None and leaf.dtype == expected.codes
        shown = _shown(scales) if hasattr(scales, "dtype") else "nothing"
        needed = f"float32{list(scales_shape(leaf.shape))}" if has_scales else "nothing"
        if shown != needed:
            wrong.append(f"{expected.name} has {shown} instead of {needed}")
    if wrong:
        raise ValueError(
            f"state.moment_scales do not fit the moments: {shortened(wrong)}. Inside "
            f"jax.shard_map, each shard of a last axis should be a multiple of {BLOCK} long: "
            "otherwise replicate that axis."
        )


def _shown(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


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


def inner_like(
    init: Callable[[Any], optax.OptState],
    wide: optax.Params,
    moment_dtypes: Mapping[str, np.dtype] | None,
) -> InnerLike | None:
    """Describes the state that `init` makes of float32 params, from their shapes and dtypes.

    None where it can't be traced.
    """
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wide)
    try:
        made = jax.eval_shape(init, wide)
    except Exception:  # an init that reads values, or more than shapes; its steps are checked still
        return None
    return InnerLike.of(made, wide, moment_dtypes)

"""Errors for params, and for states that don't belong to a transform and its params, by path.

A step compares types with those of a state that its transform makes, and looks for a fault only
where they differ: names and texts of leaves are made for errors alone.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from policy.core.arrays import (
    is_inexact,
    is_overwritten,
    is_quantized,
    leaf_names,
    path_name,
    unboxed,
)
from policy.core.messages import FROZEN, dtype_and_shape, shortened, warn_once, ways_out_of
from policy.core.policy import Policy
from policy.optim.blockwise import BLOCK, encode
from policy.optim.moments import asked_forms, is_stored_as_codes
from policy.optim.state import MixedPrecisionState
from policy.optim.storage_modes import MasterWeights, storage_code, storage_mode, storage_text

CONVERT = "convert(state, params, to=tx) migrates it"
"""The way out for a state of other options."""

# collections of Flax's own layers
_NO_PARAMETERS = frozenset({"batch_stats", "cache", "intermediates"})


def check_params(params: Any) -> None:
    """Rejects params that no optimizer can step, and names each of them by its path.

    Raises:
      ValueError: a leaf is no array, is neither floating nor complex, is an 8-bit float, or is
        quantized.
    """
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    frozen = [path_name(path) for path, leaf in found if is_quantized(leaf)]
    if frozen:
        raise ValueError(f"params hold {shortened(frozen)}, {FROZEN}")
    wrong = [
        f"{path_name(path)} is {dtype_and_shape(leaf)} of type {type(leaf).__name__}"
        for path, leaf in found
        if isinstance(leaf, jax.ShapeDtypeStruct) or not (is_overwritten(path) or _can_step(leaf))
    ]
    if wrong:
        raise ValueError(
            f"params should be floating arrays of 16 bits or more, but {shortened(wrong)}. Keep "
            "integers out of the tree that is differentiated and updated. Of shapes, "
            "jax.eval_shape(tx.init, params) makes the shapes of a state."
            + ways_out_of(leaf for _, leaf in found)
        )


def _can_step(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_inexact(leaf) and leaf.dtype.itemsize >= 2


def differences(found: list[str], expected: list[str], trees: tuple[Any, ...] = ()) -> str:
    """Returns the text of the leaves that one tree has and the other has not, and of the kinds of
    the two trees where they differ.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    kinds = [type(tree).__name__ for tree in trees]
    differing = f" Containers: {' instead of '.join(kinds)}." if len(set(kinds)) > 1 else ""
    return (
        f"Missing: {shortened(missing) or 'nothing'}. Unexpected: {shortened(extra) or 'nothing'}."
        f"{differing}"
    )


def warn_of_wide_params(params: optax.Params, policy: Policy) -> None:
    """Warns where the policy stores params in half precision, and nobody has cast any of them."""
    leaves = jax.tree.leaves(params)
    dtypes = {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
    half = policy.param_dtype.itemsize < 4
    if half and dtypes and all(dtype.itemsize >= 4 for dtype in dtypes):
        warn_once(
            f"params are {', '.join(sorted(map(str, dtypes)))}, but the policy '{policy}' stores "
            f"them in {policy.param_dtype.name}, and an optimizer does not cast params. From a "
            "float32 checkpoint, start with params, opt_state = init_from_master(tx, f32_params), "
            "which keeps the rounding errors in the masters. To train float32 params, give the "
            "policy params=float32."
        )


def check_initial_params(params: Any) -> None:
    """Rejects params that no state can be made for, and warns of trees of other collections.

    Raises:
      ValueError: see `check_params`; or a leaf is a float64 of NumPy's without x64.
    """
    check_params(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    wide = [path_name(path) for path, x in leaves if x.dtype == np.float64]
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"params should be of dtypes that JAX has, but {shortened(wide)} is NumPy's float64, "
            "and x64 is disabled: cast them with cast_floating(params, 'float32'), or call "
            "jax.config.update('jax_enable_x64', True)."
        )
    # optax has placeholders without arrays, too
    if not leaves and (params is None or isinstance(params, (Mapping, list, tuple))):
        warnings.warn(
            "tx.init was given params without any array, so there is nothing to train: pass the "
            "params of the model, such as variables['params'].",
            stacklevel=4,
        )
    collections = sorted(_NO_PARAMETERS & set(params)) if isinstance(params, Mapping) else []
    if collections:
        warnings.warn(
            f"tx.init was given the collection {', '.join(map(repr, collections))} as params: the "
            "optimizer would update running state too (AdamW decays it). Pass the params alone: "
            "tx.init(variables['params']).",
            stacklevel=4,
        )


def require_outermost() -> None:
    """Rejects an `init` that is called by one of optax's transforms.

    A wrapped transform can't see its wrapper, but each wrapper makes its state by calling the
    wrapped `init`. So one look at the callers, once for each state, covers every later use of it.

    Raises:
      TypeError: by the wrapper's name.
    """
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    found = [f for f in frames if _defines_transforms(f.f_globals.get("__name__", ""))]
    if found:
        # the last one is the outermost: partition calls masked
        name = found[-1].f_code.co_qualname.partition(".")[0]
        raise TypeError(
            f"mixed_precision should be outermost, but is inside optax's {name}, which would see "
            "the gradients of skipped steps and change updates after they were rounded. "
            f"Put it outermost: mixed_precision(optax.{name}(...), policy)."
        )


def _defines_transforms(module: str) -> bool:
    """Returns whether a module of optax defines transforms, and not only functions on trees."""
    return module.startswith("optax.") and not module.startswith("optax.tree_utils")


def require_storage(
    params: optax.Params, state: MixedPrecisionState, master_weights: MasterWeights
) -> jax.Array | Literal[True]:
    """Rejects masters that are stored in another way than `master_weights` stores them.

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
            f"({storage_text(expected)}): {CONVERT}."
        )
    is_stored = has_stored_mode(state, dtypes, expected)
    check_tree(params, state)
    leaves, tree = jax.tree.flatten(params)
    stored = tree.flatten_up_to(state.masters)
    changed, unfit = {}, {}
    for i, (p, before, kept) in enumerate(zip(leaves, dtypes, stored, strict=True)):
        shape = jnp.shape(p if is_empty(kept) else kept)
        if p.dtype != before or p.shape != shape:
            changed[i] = f"was {np.dtype(before)}{list(shape)} and is {dtype_and_shape(p)}"
        needed = storage_mode(p.dtype, made_by).stored_dtype
        if getattr(kept, "dtype", None) != needed:  # a tree that was restored may hold any
            unfit[i] = f"is {dtype_and_shape(kept)} instead of {needed or 'nothing'}"
    if changed:
        raise ValueError(
            "params changed since the optimizer state was made: "
            f"{_named(changed, params)}. Cast them back, or call resync(params, state) first."
        )
    if unfit:
        raise ValueError(
            f"state.masters do not fit master_weights={made_by!r} and these params: "
            f"{_named(unfit, params)}. Make a state with tx.init(params), or restore the one that "
            "belongs to these params."
        )
    return is_stored


def _named(faults: Mapping[int, str], params: optax.Params) -> str:
    """Returns the texts of faults, by the number of a param, with the params' names."""
    names = leaf_names(params)
    return shortened([f"{names[i]} {text}" for i, text in faults.items()])


def is_empty(node: Any) -> bool:
    """Returns whether a node stands for nothing, beside a param without a stored array."""
    return isinstance(node, optax.MaskedNode)


def has_stored_mode(
    state: MixedPrecisionState, dtypes: Sequence[DTypeLike], expected: int | None = None
) -> jax.Array | Literal[True]:
    """Compares a state's mode with the `expected` storage code, or else that of its layout.

    Returns and raises as `has_mode`; True for params that are their own masters, which are stored
    alike in every mode.

    Args:
      dtypes: of the params.
    """
    if not [True for dtype in dtypes if np.dtype(dtype).itemsize < 4]:
        return True
    return has_mode(state, state.layout.storage if expected is None else expected)


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
                f"Restore them into a state of the transform that saved them; then {CONVERT}."
            )
    return True


def _is_readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def check_tree(params: optax.Params, state: MixedPrecisionState) -> None:
    """Rejects params, without overwritten leaves, of another tree than the state was made from.

    Raises:
      ValueError: the trees differ.
    """
    tree, made_from = (jax.tree.structure(x, is_leaf=is_empty) for x in (params, state.masters))
    if tree != made_from:
        ours = leaf_names(made_from.unflatten(range(made_from.num_leaves)))
        raise ValueError(
            "params should have the tree that the optimizer state was made for. "
            f"{differences(leaf_names(params), ours, (params, state.masters))} Pass the params "
            "that the optimizer steps, or make a new state with tx.init(params)."
        )


def check_inner(
    inner: optax.OptState,
    made: optax.OptState,
    params: optax.Params,
    moment_dtypes: Mapping[str, np.dtype] | None,
) -> None:
    """Rejects an inner state that the transform did not make for these params.

    Integers may have any width, and Python numbers pass: hyperparameters are set from outside.

    Args:
      inner: the state to check.
      made: the shapes of the state that the transform makes of these params.
      params: the params.
      moment_dtypes: see `get_moment_dtypes`.

    Raises:
      ValueError: the leaves have other names; or a moment or its scales have another dtype or
        shape.
    """
    found, expected = (
        jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored_as_codes)
        for tree in (inner, made)
    )
    names, ours = ([path_name(path) for path, _ in each] for each in (found, expected))
    if names != ours:
        raise ValueError(
            "state was made by another transform than tx: use the transform that made it, or make "
            f"a new state with tx.init(params). {differences(names, ours)}"
        )
    known = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    asked = asked_forms(made, params, moment_dtypes or {})
    wrong = []
    for (path, leaf), (_, one), form in zip(found, expected, asked, strict=True):
        is_coded = is_stored_as_codes(one)
        if not (_is_of_param(path, one.shape, known) and (is_coded or is_inexact(one))):
            continue
        # inside `jax.shard_map` a leaf too small for codes may be a part of a larger one
        if is_stored_as_codes(leaf) and leaf.codec == form and not is_coded:
            one = jax.eval_shape(lambda x, form=form: encode(x, form), one)
        if types_of(leaf) != types_of(one):
            wrong.append(f"{path_name(path)} is {_text(leaf)} instead of {_text(one)}")
    if wrong:
        raise ValueError(
            f"state holds other arrays than tx stores for these params: {shortened(wrong)}. Pass "
            "the moment_dtype, or Optax's own mu_dtype, that the state was made with, or "
            f"{CONVERT}. For params of other shapes make a state with tx.init(params). Inside "
            "jax.shard_map, shards of the last axis of moments in 8 bits are multiples of "
            f"{BLOCK} long: otherwise replicate that axis."
        )


def types_of(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the structure of a tree, and its leaves' shapes and dtypes; it can be hashed."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple([(getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in leaves])


def _text(leaf: Any) -> str:
    if not is_stored_as_codes(leaf):
        return dtype_and_shape(leaf)
    return f"{dtype_and_shape(leaf.qvalue)} with scales {dtype_and_shape(leaf.scale)}"


def _is_of_param(
    path: KeyPath, shape: tuple[int, ...], params: dict[KeyPath, tuple[int, ...]]
) -> bool:
    """Returns whether a leaf's path ends in a param's.

    Params that are one array have no path: then leaves of its shape belong to it.
    """
    if any(getattr(key, "name", None) == "hyperparams" for key in path):
        return False
    return any(path[start:] in params for start in range(len(path))) or params.get(()) == shape

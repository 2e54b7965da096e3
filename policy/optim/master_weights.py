"""Master weights: the float32 values that half-precision params are a rounding of, as trees."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from policy.core.arrays import (
    boxed_like,
    is_overwritten,
    leaf_names,
    path_name,
    unboxed,
    working_dtype,
)
from policy.core.messages import shortened
from policy.optim.finiteness import differentiated
from policy.optim.rounding import round_to
from policy.optim.state import (
    Layout,
    MixedPrecisionState,
    find_state,
    require_state,
    states_in,
    strong_copy,
)
from policy.optim.state_checks import check_tree, has_mode, require_storage
from policy.optim.storage_modes import (
    STORAGE_MODES,
    MasterWeights,
    Stored,
    storage_mode,
)

Params = TypeVar("Params")


def without_overwritten(tree: Any) -> Any:
    """Returns `tree` with an empty node for each leaf under `_overwrite_with_gradient`.

    No optimizer steps those.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if is_overwritten(path) else leaf, tree
    )


def with_overwritten(
    result: optax.Params, params: Any, gradients: Any, finite: jax.Array, as_updates: bool
) -> optax.Params:
    """Fills the empty nodes of a step's result: a leaf's gradient is its new value.

    Args:
      result: new params, or with `as_updates` the differences to them.
      params: the params before.
      gradients: their gradients, unscaled there.
      finite: () bool; where it is False, the leaves stay.
      as_updates: see `result`.
    """
    if differentiated(params) is not params:
        gradients = type(params)(gradients, gradients)

    def one(path: jax.tree_util.KeyPath, p: jax.Array, g: jax.Array, r: jax.Array) -> jax.Array:
        if not is_overwritten(path):
            return r
        return (
            jnp.where(finite, g - p, jnp.zeros_like(p)) if as_updates else jnp.where(finite, g, p)
        )

    return jax.tree_util.tree_map_with_path(one, params, gradients, result)


def layout_of(params: optax.Params, master_weights: MasterWeights) -> Layout:
    """Returns the layout of params without their overwritten leaves.

    Args:
      params: a tree of arrays.
      master_weights: the mode's name, or "auto".

    Raises:
      ValueError: the mode can't store a param's dtype, such as float16 in "remainder".
    """
    leaves = jax.tree.leaves(params)
    _check_mode(leaf_names(params), [leaf.dtype for leaf in leaves], master_weights)
    names = tuple(np.dtype(leaf.dtype).name for leaf in leaves)
    return Layout(master_weights, names or None)


def _check_mode(names: list[str], dtypes: list[DTypeLike], master_weights: MasterWeights) -> None:
    wrong = [
        f"{name} is {np.dtype(dtype).name}"
        for name, dtype in zip(names, dtypes, strict=True)
        if np.dtype(dtype).itemsize < 4
        and np.dtype(dtype).name not in storage_mode(dtype, master_weights).param_dtypes
    ]
    if wrong:
        takes = " and ".join(STORAGE_MODES[master_weights].param_dtypes)
        raise ValueError(
            f"master_weights={master_weights!r} is for {takes} params, but {shortened(wrong)}. Use "
            "'auto', which stores a master of each half dtype, or 'full'."
        )


def make_masters(params: optax.Params, master_weights: MasterWeights) -> optax.Params:
    """Returns a tree like `params`: the stored array of each leaf, or an empty node."""
    return jax.tree.map(lambda p: storage_mode(p.dtype, master_weights).init(p), params)


def inner_params(
    params: optax.Params, masters: optax.Params, master_weights: MasterWeights
) -> optax.Params:
    """Returns the params that the inner transform sees: float32, or wider."""
    return jax.tree.map(
        lambda p, stored: storage_mode(p.dtype, master_weights).join(p, stored), params, masters
    )


def master_params(params: Params, state: Any) -> Params:
    """Returns the float32 weights: masters where there are any, else the params in float32.

    Evaluation, export and averages should read these. Params that are wider than float32, and
    leaves under `_overwrite_with_gradient`, are returned as they are.

    Args:
      params: the params that `state` belongs to; for an `nnx.Optimizer`,
        `nnx.state(model, nnx.Param)`.
      state: an optimizer state that holds a `MixedPrecisionState`, or an object with one as its
        attribute `opt_state`.

    Returns:
      A tree like `params`, of float32 or wider arrays.

    Raises:
      ValueError: `state` holds none, params differ from those it was made from, or masters were
        restored from another storage mode. In a traced function such masters are NaN.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import apply_gradients, master_params, mixed_precision
      >>> tx = mixed_precision(optax.sgd(1e-3), "bfloat16")
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> grads = {"w": jnp.ones(2)}
      >>> params, opt_state, _ = apply_gradients(tx, params, tx.init(params), grads)
      >>> params["w"]  # steps of 1e-3 are below half an ulp of bfloat16
      Array([1, 1], dtype=bfloat16)
      >>> master_params(params, opt_state)["w"]
      Array([0.999, 0.999], dtype=float32)
    """
    if states_in(params):
        raise ValueError(
            f"params should be a tree of arrays, but got a {type(params).__name__}, which holds an "
            "optimizer state: call master_params(params, opt_state)."
        )
    state, plain = find_state(state), unboxed(params)
    state = state._replace(masters=unboxed(state.masters))
    master_weights = state.layout.master_weights
    is_stored = require_storage(without_overwritten(plain), state, master_weights)

    def one(path: jax.tree_util.KeyPath, p: jax.Array, stored: Stored) -> jax.Array:
        if is_overwritten(path):
            return p
        wide = storage_mode(p.dtype, master_weights).join(p, stored)
        return (
            wide if is_stored is True else jnp.where(is_stored, wide, jnp.full_like(wide, jnp.nan))
        )

    # an overwritten leaf pairs with an empty node too
    return boxed_like(jax.tree_util.tree_map_with_path(one, plain, state.masters), params)


def resync(params: Any, state: MixedPrecisionState) -> MixedPrecisionState:
    """Returns a state whose masters follow params that were written to outside of the optimizer.

    A full master that rounds to its param keeps its low bits; any other becomes the param's value.
    A remainder, or a Kahan error, can't tell which elements were written to: all of them start from
    the params. Moments, counts and the loss scale stay. The tree must be the one that the state was
    made from; dtypes may have changed.

    Args:
      params: the params as they are now.
      state: a `MixedPrecisionState`.

    Raises:
      TypeError: `state` is not a `MixedPrecisionState`.
      ValueError: the tree of params differs, the mode can't store their dtype, or masters were
        restored from another storage mode. In a traced function all of those start from the params.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import master_params, mixed_precision
      >>> from policy.optim import resync
      >>> tx = mixed_precision(optax.adam(1e-3), "float16", loss_scale="dynamic")
      >>> params = {"w": jnp.ones(2, jnp.float16)}
      >>> opt_state = tx.init(params)
      >>> params["w"] = params["w"] * 2
      >>> opt_state = resync(params, opt_state)
      >>> master_params(params, opt_state)["w"]
      Array([2., 2.], dtype=float32)
    """
    require_state(state, "resync(params, opt_state)")
    params, boxes = without_overwritten(unboxed(params)), (state.masters, state.mode)
    state = state._replace(masters=unboxed(boxes[0]))
    master_weights = state.layout.master_weights
    is_stored = has_mode(state, state.layout.storage)
    check_tree(params, state)
    layout = layout_of(params, master_weights)

    def follow(p: jax.Array, stored: Any) -> Stored:
        mode = storage_mode(p.dtype, master_weights)
        if not mode.stores or getattr(stored, "dtype", None) != jnp.float32:
            return mode.init(p)
        is_kept = is_stored & (round_to(stored, p.dtype) == p)
        return mode.split(jnp.where(is_kept, stored, p.astype(jnp.float32)), p.dtype)[1]

    masters = jax.tree.map(follow, params, state.masters)
    made = masters, jnp.full_like(unboxed(state.mode), layout.storage)
    masters, code = boxed_like(made, boxes)
    return state._replace(masters=masters, mode=code, layout=layout)


def init_masters(
    f32_params: Any, param_dtype: DTypeLike, master_weights: MasterWeights
) -> tuple[Any, Any]:
    """Returns params in `param_dtype`, and the masters that hold their rounding errors.

    All are rounded to nearest; overwritten leaves stay as they are. Raises as `layout_of` does.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(f32_params)
    params, masters = [], []
    for path, leaf in leaves:
        if is_overwritten(path):
            params.append(leaf)
            masters.append(optax.MaskedNode())
            continue
        dtype = param_dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        _check_mode([path_name(path)], [dtype], master_weights)
        mode = storage_mode(dtype, master_weights)
        param, stored = mode.split(jnp.asarray(leaf).astype(working_dtype(dtype)), dtype)
        params.append(param)
        # a master may be the caller's own array, which isn't ours to donate
        masters.append(jax.tree.map(strong_copy, stored) if mode.is_master else stored)
    return jax.tree.unflatten(tree, params), jax.tree.unflatten(tree, masters)

"""Master weights: the float32 values that half-precision params are a rounding of."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from policy.core.arrays import boxed_like, is_overwritten, path_name, unboxed, working_dtype
from policy.core.messages import shortened
from policy.optim.checks import check_params, check_tree, has_mode, require_storage
from policy.optim.host_memory import is_on_host, on_device, on_host
from policy.optim.moments import is_stored_as_codes, moment_like
from policy.optim.state import (
    MixedPrecisionState,
    check_mode,
    find_state,
    layout_of,
    require_state,
    states_in,
    strong_copy,
    strongly_typed,
    without_overwritten,
)
from policy.optim.storage_modes import FULL, Stored, round_to, storage_mode
from policy.optim.wrapper import MixedPrecision, require_mixed_precision

Params = TypeVar("Params")


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
    state = state._replace(masters=on_device(unboxed(state.masters)))
    master_weights = state.layout.master_weights
    is_stored = require_storage(without_overwritten(plain), state, master_weights)

    def one(path: jax.tree_util.KeyPath, p: jax.Array, stored: Stored) -> jax.Array:
        if is_overwritten(path):
            return p
        wide = storage_mode(p.dtype, master_weights).join(p, stored)
        if is_stored is True:
            return wide
        return jnp.where(is_stored, wide, jnp.full_like(wide, jnp.nan))

    # an overwritten leaf pairs with an empty node too
    return boxed_like(jax.tree_util.tree_map_with_path(one, plain, state.masters), params)


def resync(params: Any, state: MixedPrecisionState) -> MixedPrecisionState:
    """Returns a state whose masters follow params that were written to outside of the optimizer.

    A full master that rounds to its param keeps its low bits; any other becomes the param's value.
    A remainder can't tell which elements were written to: all of them start from the params.
    Moments, counts and the loss scale stay. The tree must be the one that the state was made from;
    dtypes may have changed.

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
    state = state._replace(masters=on_device(unboxed(boxes[0])))
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
    masters = on_host(masters) if is_on_host(boxes[0]) else masters
    made = masters, jnp.full_like(unboxed(state.mode), layout.storage)
    masters, code = boxed_like(made, boxes)
    return state._replace(masters=masters, mode=code, layout=layout)


def init_from_master(
    tx: optax.GradientTransformation, f32_params: Params
) -> tuple[Params, MixedPrecisionState]:
    """Makes params in the policy's param_dtype, and a state whose masters are the float32 weights.

    Loads a float32 checkpoint: `tx.init(cast params)` would start from rounded masters.

    Args:
      tx: the transform that `mixed_precision` returned.
      f32_params: a tree of float32 arrays.

    Returns:
      `(params, state)`.

    Raises:
      TypeError: `tx` is not `mixed_precision`'s own.
      ValueError: a leaf is no floating array.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import master_params, mixed_precision
      >>> from policy import init_from_master
      >>> tx = mixed_precision(optax.adam(1e-3), "bfloat16")
      >>> params, opt_state = init_from_master(tx, {"w": jnp.array([0.1])})
      >>> params["w"]
      Array([0.100098], dtype=bfloat16)
      >>> master_params(params, opt_state)["w"]
      Array([0.1], dtype=float32)
    """
    stepper = require_mixed_precision(tx).stepper
    check_params(f32_params)
    leaves, tree = jax.tree_util.tree_flatten_with_path(f32_params)
    params, masters = [], []
    for path, leaf in leaves:
        param, stored = leaf, optax.MaskedNode()
        if not is_overwritten(path):
            is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            dtype = stepper.policy.param_dtype if is_floating else leaf.dtype
            check_mode([path_name(path)], [dtype], stepper.master_weights)
            mode = storage_mode(dtype, stepper.master_weights)
            param, stored = mode.split(jnp.asarray(leaf).astype(working_dtype(dtype)), dtype)
            if mode is FULL:  # it may be the caller's own array, which isn't ours to donate
                stored = jax.tree.map(strong_copy, stored)
        params.append(param)
        masters.append(stored)
    params = tree.unflatten(params)
    return params, stepper.make_state(without_overwritten(params), tree.unflatten(masters))


def convert(
    state: MixedPrecisionState, params: Any, *, to: optax.GradientTransformation
) -> MixedPrecisionState:
    """Migrates an optimizer state to another storage mode, moment_dtype and kind of loss scale.

    The float32 weights stay, to the precision of the new mode: "none" and "stochastic" keep the
    param itself. Params stay as they are. Moments are upcast, or rounded to nearest. Counts stay; a
    loss scale of another kind starts anew.

    The state of an `nnx.Optimizer` goes into one that was made with the new transform::

      made = convert(before.opt_state, nnx.state(model, nnx.Param), to=after.tx)
      nnx.update(after.opt_state, nnx.state(made))

    Args:
      state: a `MixedPrecisionState` of concrete arrays, in the mode that it was made, or restored,
        with.
      params: the params that it belongs to.
      to: a transform that `mixed_precision` returned, around the same inner transform.

    Returns:
      A new state.

    Raises:
      TypeError: `state` is not a `MixedPrecisionState`, or holds traced arrays; or `to` is not
        `mixed_precision`'s own.
      ValueError: the params' tree or dtypes are not those of the state; a master is not that of its
        param; the mode has no storage for a param's dtype; or the inner transform's state has
        another tree. Where it has the same tree, moments are taken as they are.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import mixed_precision
      >>> from policy.optim import convert
      >>> tx = mixed_precision(optax.adam(1e-3), "bfloat16")
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> opt_state = tx.init(params)
      >>> opt_state.masters["w"].dtype
      dtype('uint16')
      >>> full = mixed_precision(optax.adam(1e-3), "bfloat16", master_weights="full")
      >>> convert(opt_state, params, to=full).masters["w"].dtype
      dtype('float32')
    """
    require_state(state, "convert(opt_state, params, to=tx)")
    to = require_mixed_precision(to)
    state, params = on_device(unboxed(state)), without_overwritten(unboxed(params))
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, params))):
        raise TypeError("convert checks values: call it outside of jit, on concrete arrays.")
    require_storage(params, state, state.layout.master_weights)
    layout = layout_of(params, to.master_weights)
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    masters, wrong = [], []
    for (path, p), stored in zip(leaves, tree.flatten_up_to(state.masters), strict=True):
        before = storage_mode(p.dtype, state.layout.master_weights)
        after = storage_mode(p.dtype, to.master_weights)
        if before is FULL and (off := _elements_off(p, stored)):
            wrong.append(f"{path_name(path)} in {off} of {p.size} elements")
        if not after.stores:
            masters.append(after.init(p))
            continue
        value = before.join(p, stored)
        # where a master misses its param by an ulp, as optax's own addition can make it, the param
        # is right
        is_near = round_to(value, p.dtype) == p
        masters.append(after.split(jnp.where(is_near, value, p.astype(value.dtype)), p.dtype)[1])
    if wrong:
        raise ValueError(
            f"params should be the rounded masters of state, but differ: {shortened(wrong)}. If "
            "params were changed outside the optimizer, call resync(params, state) first."
        )
    state = _with_options(state, params, to)
    code = jnp.full_like(state.mode, layout.storage)
    state = state._replace(masters=jax.tree.unflatten(tree, masters), mode=code, layout=layout)
    return on_host(state) if to.state_memory_kind else state


def _elements_off(param: jax.Array, master: jax.Array) -> int:
    """Counts the elements of a master that are nowhere near those of its param.

    Near is an ulp, and a step through optax's own addition: that rounds to an ulp of float32 of the
    larger operand.
    """
    wide, stored = np.asarray(param, np.float64), np.asarray(master, np.float64)
    is_finite = np.isfinite(wide)
    largest = np.max(np.abs(wide), initial=0, where=is_finite)
    room = float(jnp.finfo(param.dtype).eps) * np.abs(wide) + 2.0**-20 * largest + 2.0**-24
    with np.errstate(invalid="ignore"):  # both may be infinite
        is_off = np.abs(stored - wide) > room
    return int(np.sum(is_off | (is_finite & np.isnan(stored))))


def _with_options(
    state: MixedPrecisionState, params: optax.Params, to: MixedPrecision
) -> MixedPrecisionState:
    """Returns a state whose moments' dtypes and kind of loss scale are those of `to`."""
    (fresh, expected), (leaves, tree) = (
        jax.tree.flatten(inner, is_leaf=is_stored_as_codes)
        for inner in (jax.eval_shape(to.init, params).inner, strongly_typed(state.inner))
    )
    if tree != expected:
        raise ValueError(
            "convert keeps the inner state, but to wraps a transform whose state has another tree, "
            f"{expected}: make a new state with tx.init(params)."
        )
    inner = tree.unflatten(map(moment_like, leaves, fresh))
    is_same_kind = type(state.loss_scale) is type(to.loss_scale)
    scale = state.loss_scale if is_same_kind else jax.tree.map(strong_copy, to.loss_scale)
    return state._replace(inner=inner, loss_scale=scale)

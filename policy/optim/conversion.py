"""States from other states and weights: `convert` and `init_from_master`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from policy.core.arrays import path_name, unboxed
from policy.core.messages import shortened
from policy.optim.checks import check_params
from policy.optim.master_weights import init_masters, layout_of, without_overwritten
from policy.optim.moments import (
    StoredInner,
    has_codes,
    is_moment,
    narrow_moments,
    widen_moments,
)
from policy.optim.rounding import round_to
from policy.optim.state import (
    MixedPrecisionState,
    require_state,
    strong_copy,
    strongly_typed,
)
from policy.optim.state_checks import require_storage
from policy.optim.storage_modes import StorageMode, Stored, storage_mode
from policy.optim.wrapper import MixedPrecision, require_mixed_precision

Params = TypeVar("Params")


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
      >>> from policy.optim import init_from_master
      >>> tx = mixed_precision(optax.adam(1e-3), "bfloat16")
      >>> params, opt_state = init_from_master(tx, {"w": jnp.array([0.1])})
      >>> params["w"]
      Array([0.100098], dtype=bfloat16)
      >>> master_params(params, opt_state)["w"]
      Array([0.1], dtype=float32)
    """
    stepper = require_mixed_precision(tx).stepper
    check_params(f32_params)
    dtype = stepper.policy.param_dtype
    params, masters = init_masters(f32_params, dtype, stepper.master_weights)
    return params, stepper.make_state(without_overwritten(params), masters)


def convert(
    state: MixedPrecisionState, params: Any, *, to: optax.GradientTransformation
) -> MixedPrecisionState:
    """Migrates an optimizer state to another storage mode, moment_dtype and kind of loss scale.

    The float32 weights stay, to the precision of the new mode: "kahan" keeps 16 bits of the
    fraction of a bfloat16 param's master, "none" and "stochastic" the param itself. Params stay as
    they are. Moments are widened, or rounded to nearest. Counts stay; a loss scale of another kind
    starts anew.

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
    state, params = unboxed(state), without_overwritten(unboxed(params))
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, params))):
        raise TypeError("convert checks values: call it outside of jit, on concrete arrays.")
    require_storage(params, state, state.layout.master_weights)
    layout = layout_of(params, to.master_weights)
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    masters, wrong = [], []
    for (path, p), stored in zip(leaves, tree.flatten_up_to(state.masters), strict=True):
        before = storage_mode(p.dtype, state.layout.master_weights)
        after = storage_mode(p.dtype, to.master_weights)
        if before.is_master and (off := _elements_off(p, stored)):
            wrong.append(f"{path_name(path)} in {off} of {p.size} elements")
        masters.append(_migrated(p, stored, before, after))
    if wrong:
        raise ValueError(
            f"params should be the rounded masters of state, but differ: {shortened(wrong)}. If "
            "params were changed outside the optimizer, call resync(params, state) first."
        )
    state = _with_options(state, params, to)
    code = jnp.full_like(state.mode, layout.storage)
    return state._replace(masters=jax.tree.unflatten(tree, masters), mode=code, layout=layout)


def _migrated(param: jax.Array, stored: Stored, before: StorageMode, after: StorageMode) -> Stored:
    if not after.stores:
        return after.init(param)
    value = before.join(param, stored)
    # where a master misses its param by an ulp, as optax's own addition can make it, the param
    # is right
    is_near = round_to(value, param.dtype) == param
    return after.split(jnp.where(is_near, value, param.astype(value.dtype)), param.dtype)[1]


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
    fresh = jax.eval_shape(to.init, params)
    if jax.tree.structure(fresh.inner) != jax.tree.structure(state.inner):
        raise ValueError(
            "convert keeps the inner state, but to wraps a transform whose state has another tree, "
            f"{jax.tree.structure(fresh.inner)}: make a new state with tx.init(params)."
        )
    inner = jax.tree.map(strongly_typed, state.inner)
    stored = StoredInner(inner, state.moment_scales)
    pairs = zip(jax.tree.leaves(inner), jax.tree.leaves(fresh.inner), strict=True)
    # the floating dtype of a leaf in the new state, where it is another
    targets = [like.dtype if is_moment(x) and x.dtype != like.dtype else None for x, like in pairs]
    new = narrow_moments(
        widen_moments(stored, targets),
        targets,
        like=stored,
        with_scales=has_codes(to.moment_dtypes),
    )
    is_same_kind = type(state.loss_scale) is type(to.loss_scale)
    scale = state.loss_scale if is_same_kind else jax.tree.map(strong_copy, to.loss_scale)
    return state._replace(inner=new.state, moment_scales=new.scales, loss_scale=scale)

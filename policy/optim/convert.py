"""`convert`: the state of one `mixed_precision` as another one stores it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from policy.optim.masters import layout_of, without_overwritten
from policy.optim.moments import narrow_moments
from policy.optim.naming import optimizer_name
from policy.optim.rounding import round_to
from policy.optim.state import MixedPrecisionState, strengthened, strong
from policy.optim.state_checks import require_storage
from policy.optim.storage import MASTER_WEIGHTS, Kind, MasterWeights, hold, kind_of, release, widen_leaf
from policy.optim.wrapper import MixedPrecision
from policy.trees import leaf_names, shortened, unboxed


def convert(state: MixedPrecisionState, params: Any, *, to: MixedPrecision | MasterWeights) -> MixedPrecisionState:
    """Migrates an optimizer state to another storage mode, and to another moment_dtype and loss scale.

    ``opt_state = convert(opt_state, params, to=mixed_precision(tx, policy, master_weights="full"))``

    The float32 weights stay what they were, to what the new mode can hold: "kahan" keeps 16 bits of the fraction of a
    bfloat16 param's master, "none" and "stochastic" the param itself. Params stay as they are. Moments are widened, or
    rounded to nearest. Counts stay; a loss scale of another kind starts anew.

    Of an `nnx.Optimizer`, into one that was made with the new transform::

      made = convert(before.opt_state, nnx.state(model, nnx.Param), to=after.tx)
      nnx.update(after.opt_state, nnx.state(made))

    Args:
      state: a `MixedPrecisionState` of concrete arrays, in the mode that it was made, or restored, with.
      params: the params that it belongs to.
      to: what `mixed_precision` returned, around the same inner transform; or a mode of `master_weights`, and
        everything else stays.

    Returns:
      A new state.

    Raises:
      TypeError: `state` is not a `MixedPrecisionState`, or holds traced arrays; or `to` is neither of the two.
      ValueError: the params' tree or dtypes are not those of the state; a master is not that of its param; the mode
        has no storage for a param's dtype; or the inner transform's state has another tree. Where it has the same
        tree, moments are taken as they are.
    """
    if not isinstance(state, MixedPrecisionState):
        raise TypeError(
            f"convert takes a MixedPrecisionState, but got {type(state).__name__}: call "
            "convert(opt_state, params, to=tx)."
        )
    if not isinstance(to, MixedPrecision) and to not in MASTER_WEIGHTS:
        modes = ", ".join(map(repr, MASTER_WEIGHTS))
        raise TypeError(f"to should be what mixed_precision returned, or one of {modes}, but got {to!r}.")
    state, params = unboxed(state), without_overwritten(unboxed(params))
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, params))):
        raise TypeError("convert checks values: call it outside of jit, on concrete arrays.")
    made_by = state.layout.master_weights
    require_storage(params, state, made_by)
    mode = to.master_weights if isinstance(to, MixedPrecision) else to
    optimizer = optimizer_name(to.inner, state.inner) if isinstance(to, MixedPrecision) else state.layout.optimizer
    layout = layout_of(params, mode, optimizer)
    leaves, tree = jax.tree.flatten(params)
    kept = tree.flatten_up_to(state.masters)
    _check_masters(leaf_names(params), leaves, kept, made_by)
    masters = [
        _migrated(p, k, kind_of(p.dtype, made_by), kind_of(p.dtype, mode)) for p, k in zip(leaves, kept, strict=True)
    ]
    if isinstance(to, MixedPrecision):
        state = _with_options(state, params, to)
    code = jnp.full_like(state.mode, layout.storage)
    return state._replace(masters=jax.tree.unflatten(tree, masters), mode=code, layout=layout)


def _migrated(param: jax.Array, kept: Any, before: Kind, after: Kind) -> Any:
    wide = widen_leaf(param, kept, before)
    if after == "none":
        return release(param, param.dtype, after)[1]
    # where a master misses its param by an ulp, as optax's own addition can make it, the param is right
    wide = jnp.where(round_to(wide, param.dtype) == param, wide, param.astype(wide.dtype))
    return release(hold(wide, param.dtype, "none" if after == "stochastic" else after), param.dtype, after)[1]


def _check_masters(names: list[str], params: list[jax.Array], kept: list[Any], mode: MasterWeights) -> None:
    """Refuses full masters that are nowhere near their params: those of a tree that was put together by hand."""
    wrong = []
    for name, p, k in zip(names, params, kept, strict=True):
        if kind_of(p.dtype, mode) != "full":
            continue
        wide, master = np.asarray(p, np.float64), np.asarray(k, np.float64)
        finite = np.isfinite(wide) & np.isfinite(master)
        # an ulp, and a step through optax's own addition: that rounds to an ulp of float32 of the larger operand
        room = float(jnp.finfo(p.dtype).eps) * np.abs(wide) + 2.0**-20 * np.max(np.abs(wide), initial=0, where=finite)
        apart = np.abs(np.where(finite, master, 0) - np.where(finite, wide, 0))
        is_off = np.where(finite, apart > room + 2.0**-24, np.isfinite(wide) & ~np.isfinite(master))
        off = int(np.sum(is_off))
        if off:
            wrong.append(f"{name} in {off} of {p.size} elements")
    if wrong:
        raise ValueError(
            f"params should be the rounded masters of state, but differ: {shortened(wrong)}. Where the params were "
            "written to, call resync(params, state) first."
        )


def _with_options(state: MixedPrecisionState, params: Any, to: MixedPrecision) -> MixedPrecisionState:
    """A state whose moments have the dtypes that `to` stores, and whose loss scale is of its kind."""
    recipe = to.recipe
    fresh = jax.eval_shape(to.init, params)
    if jax.tree.structure(fresh.inner) != jax.tree.structure(state.inner):
        raise ValueError(
            f"convert keeps the inner state, but that was made by {state.layout.optimizer}, and to is "
            f"{optimizer_name(recipe.inner, fresh.inner)}: start anew with tx.init(params)."
        )
    inner = jax.tree.map(strengthened, state.inner)
    targets = [_other_dtype(*pair) for pair in zip(jax.tree.leaves(inner), jax.tree.leaves(fresh.inner), strict=True)]
    is_same_kind = type(state.loss_scale) is type(recipe.loss_scale)
    scale = state.loss_scale if is_same_kind else jax.tree.map(strong, recipe.loss_scale)
    return state._replace(inner=narrow_moments(inner, targets), loss_scale=scale)


def _other_dtype(moment: Any, like: Any) -> Any:
    """The floating dtype that a leaf has in the new state, where it is another."""
    is_other = moment.dtype != like.dtype and jnp.issubdtype(moment.dtype, jnp.floating)
    return like.dtype if is_other else None

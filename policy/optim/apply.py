"""The fast path: one step that returns the new params themselves."""

from __future__ import annotations

from typing import Any

import jax
import optax

from policy.grads.value_and_grad import ScaledGradients
from policy.optim.checks import check_params
from policy.optim.masters import init_masters, without_overwritten
from policy.optim.state import MixedPrecisionState, states_in
from policy.optim.wrapper import MixedPrecision


def apply_gradients(
    tx: optax.GradientTransformation, params: Any, state: Any, grads: Any, **extra_args: Any
) -> tuple[Any, MixedPrecisionState, jax.Array]:
    """One optimizer step, or a skipped one.

    ``params, opt_state, finite = apply_gradients(tx, params, opt_state, grads)``

    Params, masters and the inner state go through one `lax.cond`: a step with non-finite gradients returns them as they
    are. Safe to donate `params` and `state`. Outside of `jax.jit` the step is compiled too, once for each shape: the
    inner transform's Python code runs when it is traced.

    Args:
      tx: what `mixed_precision` returned; nothing around it.
      params: a tree of floating arrays. Leaves under `_overwrite_with_gradient` take their gradient as their value.
      state: the `MixedPrecisionState` that `tx.init(params)` made.
      grads: a plain tree of true gradients, or `ScaledGradients`, divided by the scale that they carry. For
        `optax.contrib.dpsgd` they are per example, with an axis in front of each; for `optax.lookahead`, whose params
        are an `optax.LookaheadParams`, those of its fast params.
      **extra_args: handed to the inner transform's update.

    Returns:
      The params in their own dtypes, equal to the rounded masters; the state; a () bool that gates user state
      (`select_tree`).

    Raises:
      TypeError: `tx` or `state` is not `mixed_precision`'s own, or arguments are in another order.
      ValueError: trees, shapes or dtypes don't fit.
    """
    _require_order(tx=tx, params=params, state=state, grads=grads)
    recipe = _require_ours(tx, state).recipe
    params, state = recipe.apply(params, state, grads, extra_args)
    return params, state, state.finite


def init_from_master(tx: optax.GradientTransformation, f32_params: Any) -> tuple[Any, MixedPrecisionState]:
    """Params in the policy's param_dtype, and a state whose masters keep what that rounding dropped.

    For a load from a float32 checkpoint: `tx.init(cast params)` would start from rounded masters.

    Args:
      tx: what `mixed_precision` returned.
      f32_params: a tree of float32 arrays.

    Returns:
      `(params, state)`.

    Raises:
      TypeError: `tx` is not `mixed_precision`'s own.
      ValueError: a leaf is no floating array.
    """
    recipe = _require_ours(tx, None).recipe
    check_params(f32_params)
    params, masters = init_masters(f32_params, recipe.policy.param_dtype, recipe.master_weights)
    return params, recipe.make_state(without_overwritten(params), masters)


def _require_order(**given: Any) -> None:
    """Refuses arguments in an order that their types tell to be another than `tx, params, state, grads`."""
    found = {name: _place_of(value) for name, value in given.items()}
    if any(place not in (None, name) for name, place in found.items()):
        listed = ", ".join(f"{type(value).__name__} for {name}" for name, value in given.items())
        raise TypeError(
            f"The arguments of apply_gradients are in another order than theirs: got {listed}. Call "
            "apply_gradients(tx, params, opt_state, grads)."
        )


def _place_of(value: Any) -> str | None:
    """Returns the argument that a value can only be, or None for a tree, which may be params or gradients."""
    if isinstance(value, optax.GradientTransformation):
        return "tx"
    if isinstance(value, ScaledGradients):
        return "grads"
    return "state" if isinstance(value, MixedPrecisionState) else None


def _require_ours(tx: Any, state: Any) -> MixedPrecision:
    if isinstance(tx, MixedPrecision):
        return tx
    if states_in(state):
        raise TypeError(
            f"tx should be what mixed_precision returned, but got {type(tx).__name__} with a mixed_precision inside. "
            "Put it outermost: mixed_precision(optax.chain(...), policy), and so for MultiSteps, masked and the rest."
        )
    raise TypeError(
        f"tx should be what mixed_precision returned, but got {type(tx).__name__}: wrap it first, "
        "mixed_precision(tx, policy)."
    )

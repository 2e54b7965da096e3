"""`apply_gradients`: one step that returns the new params themselves."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import optax

from policy.grads.value_and_grad import ScaledGradients
from policy.optim.state import MixedPrecisionState
from policy.optim.wrapper import require_mixed_precision

Params = TypeVar("Params")


def apply_gradients(
    tx: optax.GradientTransformation, params: Params, state: Any, grads: Any, **extra_args: Any
) -> tuple[Params, MixedPrecisionState, jax.Array]:
    """Takes one optimizer step, or skips it.

    Params, masters and the inner state go through one `lax.cond`: a step with non-finite gradients
    returns them as they are. Safe to donate `params` and `state`. Outside of `jax.jit` the step is
    compiled too, once for each shape: the inner transform's Python code runs when it is traced.

    Args:
      tx: the transform that `mixed_precision` returned; nothing around it.
      params: a tree of floating arrays. Leaves under `_overwrite_with_gradient` take their gradient
        as their value.
      state: the `MixedPrecisionState` that `tx.init(params)` made.
      grads: a plain tree of true gradients, or `ScaledGradients`, divided by the scale that they
        carry. For `optax.contrib.dpsgd` they are per example, with an axis in front of each; for
        `optax.lookahead`, whose params are an `optax.LookaheadParams`, those of its fast params.
      **extra_args: handed to the inner transform's update.

    Returns:
      The params in their own dtypes, equal to the rounded masters; the state; a () bool that gates
      user state (`select_tree`).

    Raises:
      TypeError: `tx` or `state` is not `mixed_precision`'s own, or arguments are in another order.
      ValueError: trees, shapes or dtypes don't fit.

    Example:

      >>> import jax, jax.numpy as jnp, optax
      >>> from policy.optim import apply_gradients, mixed_precision
      >>> tx = mixed_precision(optax.sgd(0.5), "mixed_bfloat16")
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = tx.init(params)
      >>> grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
      >>> params, opt_state, finite = apply_gradients(tx, params, opt_state, grads)
      >>> params["w"], finite
      (Array([0., 0.], dtype=float32), Array(True, dtype=bool))
    """
    _require_order(tx=tx, params=params, state=state, grads=grads)
    stepper = require_mixed_precision(tx, state).stepper
    params, state = stepper.apply(params, state, grads, extra_args)
    return params, state, state.finite


def _require_order(**given: Any) -> None:
    """Refuses arguments whose types tell that their order is not `tx, params, state, grads`."""
    found = {name: _place_of(value) for name, value in given.items()}
    if any(place not in (None, name) for name, place in found.items()):
        listed = ", ".join(f"{type(value).__name__} for {name}" for name, value in given.items())
        raise TypeError(
            f"The arguments of apply_gradients are in the wrong order: got {listed}. "
            "Call apply_gradients(tx, params, opt_state, grads)."
        )


def _place_of(value: Any) -> str | None:
    """Returns the one argument that a value can be, or None for a tree: params or gradients."""
    if isinstance(value, optax.GradientTransformation):
        return "tx"
    if isinstance(value, ScaledGradients):
        return "grads"
    return "state" if isinstance(value, MixedPrecisionState) else None

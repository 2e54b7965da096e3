"""nnx's optimizers, which take gradients that are still scaled."""

from __future__ import annotations

from typing import Any, TypeVar

import optax
from flax import nnx as flax_nnx

from mpmodules.functions.promotion import mixing_allowed
from mpmodules.nnx._resolution import viewed
from policy.grads.scaled_gradients import ScaledGradients
from policy.optim.wrapper import MixedPrecision

M = TypeVar("M")

_MISSING: Any = object()


class Optimizer(flax_nnx.Optimizer[M]):
    """`flax.nnx.Optimizer` that takes `ScaledGradients` too.

    ``optimizer = nnx.Optimizer(model, mixed_precision(tx, policy), wrt=nnx.Param)``

    A skipped step leaves the model's params as they are. `finite_of(optimizer)` tells, and gates
    other writes of the forward pass to the model, such as BatchNorm statistics. `optimizer.step`
    counts skipped steps too, as in Flax.

    Example:
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> tx = mixed_precision(optax.sgd(0.1), model.dtype_policy)
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> loss = lambda model: model(jnp.ones((2, 4))).sum()
      >>> gradients_of = nnx.grad(loss, policy=model.dtype_policy, grads="compute")
      >>> updates = optimizer.update(model, gradients_of(model))
      >>> model.bias[...]
      Array([-0.2, -0.2, -0.2], dtype=float32)
    """

    def update(self, model: M, grads: Any = _MISSING, /, **kwargs: Any) -> optax.Updates:
        """Steps the model's params and the optimizer's state in place.

        Args:
          model: the model that the optimizer was made for.
          grads: a State of true gradients, or the `ScaledGradients` of ``value_and_grad(...,
            grads="compute")``, which are divided by the scale that they carry.
          **kwargs: handed to the transform's update.

        Returns:
          The updates, a State like the params, which was added to them.

        Raises:
          TypeError: `grads` are ScaledGradients, and the transform is not `mixed_precision`'s.
        """
        if grads is _MISSING:
            return super().update(model, **kwargs)  # pyright: ignore[reportCallIssue]  (Flax says what is missing)
        optimizer = self
        if isinstance(grads, ScaledGradients):
            if not isinstance(self.tx, MixedPrecision):
                raise TypeError(
                    "grads are ScaledGradients, which only mixed_precision divides by their "
                    f"scale, but tx is {type(self.tx).__name__}: make the optimizer with "
                    "mixed_precision(tx, policy), or compute unscaled gradients with "
                    "value_and_grad(..., grads='float32')."
                )
            optimizer, grads = viewed(self, tx=_taking_like(grads, self.tx)), grads.tree
        # Our float32 updates are added to half-precision params by optax.
        with mixing_allowed(isinstance(self.tx, MixedPrecision)):
            return super(Optimizer, optimizer).update(model, grads, **kwargs)


class ModelAndOptimizer(flax_nnx.ModelAndOptimizer[M], Optimizer[M]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`flax.nnx.ModelAndOptimizer` that takes `ScaledGradients` too.

    Example:
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> updates = optimizer.update(nnx.grad(lambda model: model(jnp.ones((2, 4))).sum())(model))
      >>> optimizer.model.bias[...]
      Array([-0.2, -0.2, -0.2], dtype=float32)
    """


def _taking_like(
    scaled: ScaledGradients, tx: MixedPrecision
) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` for the tree inside of `scaled`: the scale is put back."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return tx.update(scaled.with_tree(updates), state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)  # pyright: ignore[reportArgumentType]

"""`value_and_grad` and `grad` for nnx models: Flax's own, under a policy and a loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx
from jax.typing import ArrayLike

from policy.gradients import Finish, GradientKind, scaled_loss
from policy.loss_scale import LossScale
from policy.policy import Policy

ArgNums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: ArgNums = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Like `nnx.value_and_grad`, under a policy and a loss scale.

    What the model changes in its forward pass (BatchNorm statistics, RNG counts) is kept, as in Flax: `jax.grad` would
    lose it. The loss is cast to float32 before it is scaled, and returned unscaled.

    Gradients accumulate over the uses of a float32 param in float32. A param that is stored in half precision gets the
    sum that JAX makes, in its own dtype, cast to float32: split the model and take `policy.value_and_grad` of its state
    for a float32 sum there too.

    Args:
      loss_fn: returns a floating scalar, or with `has_aux` a pair `(loss, aux)`.
      argnums: positions, or `nnx.DiffState`s, to differentiate by.
      has_aux: whether `loss_fn` returns a pair.
      policy: a Policy or its text form, in force while `loss_fn` is traced; a built model keeps its own.
      loss_scale: None, a loss scale such as `loss_scale_of(optimizer.opt_state)`, or a positive number.
      grads: "float32" for `nnx.Optimizer.update`; "compute" returns `ScaledGradients`, for `apply_gradients`.
      **options: handed to `nnx.value_and_grad` (`graph`, `graph_updates`).

    Returns:
      A function of `loss_fn`'s arguments that returns `(loss, gradients)` or `((loss, aux), gradients)`.

    Raises:
      ValueError: `grads` is unknown or the scale not positive.
      TypeError: `loss_fn` is a bound method of a model; on the call, the loss is not a floating scalar.
    """
    if isinstance(getattr(loss_fn, "__self__", None), nnx.Module):
        raise TypeError(
            f"loss_fn should take the model as an argument, but got the bound method {loss_fn.__qualname__}, whose "
            "model would get no gradients. Pass a function: lambda model, ...: model.loss(...)."
        )
    finish = Finish.of(policy, loss_scale, grads)
    differentiated = nnx.value_and_grad(
        scaled_loss(loss_fn, finish.scale, has_aux),
        argnums=argnums,
        has_aux=True,
        **options,
    )

    @functools.wraps(loss_fn)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with finish.scope():
            (_, (loss, aux)), gradients = differentiated(*args, **kwargs)
            gradients = finish(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    return value_and_gradients


def grad(
    loss_fn: Callable[..., Any],
    argnums: ArgNums = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
    **options: Any,
) -> Callable[..., Any]:
    """`value_and_grad` without the value: returns the gradients, or with `has_aux` the pair `(gradients, aux)`."""
    differentiated = value_and_grad(
        loss_fn, argnums, has_aux, policy=policy, loss_scale=loss_scale, grads=grads, **options
    )

    @functools.wraps(loss_fn)
    def gradients_only(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradients_only

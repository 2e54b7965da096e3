"""Gradients of nnx models, and optimizers that take them: Flax's own, under a policy and a loss
scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import optax
from flax import nnx
from jax.typing import ArrayLike

from mpmodules.functions.functional import mixing_allowed
from mpmodules.nnx._resolution import viewed
from mpmodules.tracing.nnx_pure_calls import StatefulCall
from policy.core.policy import Policy
from policy.grads.float32_sums import evaluated
from policy.grads.loss_scale import LossScale, ScaledGradients
from policy.grads.value_and_grad import Finish, GradientKind, scaled_loss, without_loss
from policy.optim.wrapper import MixedPrecision
from policy.programs.dtypes import holds_half
from policy.programs.tracing.pure_calls import PureCall

ArgNums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


def value_and_grad(
    f: Callable[..., Any] | None = None,
    argnums: ArgNums = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
    **options: Any,
) -> Callable[..., Any]:
    """Like `nnx.value_and_grad`, under a policy and a loss scale.

    Updates of the model in its forward pass (BatchNorm statistics, RNG counts) are kept, as in
    Flax; `jax.grad` would lose them. The loss is cast to float32 before it is scaled, and returned
    unscaled, and so are gradients.

    Gradients accumulate over the uses of a param in float32, even if it is stored in half precision
    (`f` is traced then, and should not branch on values).

    Args:
      f: the loss: returns a floating scalar, or with `has_aux` a pair `(loss, aux)`. Without it the
        result decorates.
      argnums: positions, or `nnx.DiffState`s, to differentiate by.
      has_aux: whether `f` returns a pair.
      policy: a Policy or its text form, in force while `f` is traced; a built model keeps its own.
      loss_scale: None, a loss scale such as `loss_scale_of(optimizer.opt_state)`, or a positive
        number.
      grads: "float32" for `nnx.Optimizer.update`; "accumulator" the same, but each gradient is the
        float32 accumulator of the matmuls and sums that make it (`f` is traced then); "compute"
        returns `ScaledGradients`, for `apply_gradients`.
      **options: handed to `nnx.value_and_grad` (`graph`, `graph_updates`, `holomorphic`,
        `allow_int`).

    Returns:
      A function of `f`'s arguments that returns `(loss, gradients)` or `((loss, aux), gradients)`.

    Raises:
      ValueError: `grads` is unknown or the scale not positive; `f` is a bound method of a model.
      TypeError: on the call, the loss is not a floating scalar.

    Example:
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> loss, gradients = nnx.value_and_grad(lambda model: model(jnp.ones((2, 4))).sum())(model)
      >>> loss.dtype, gradients["kernel"][...].dtype
      (dtype('float32'), dtype('float32'))
    """
    if f is None:
        options |= {"policy": policy, "loss_scale": loss_scale, "grads": grads}
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, **options)
    if isinstance(getattr(f, "__self__", None), nnx.Module):
        raise ValueError(
            "The loss should take the model as an argument, and bound methods do not: "
            f"{f.__qualname__} would give no gradients. Pass a function: "
            "lambda model, ...: model.loss(...)."
        )
    finish = Finish(policy, loss_scale, grads)
    differentiated = _with_float32_sums(
        nnx.value_and_grad(
            scaled_loss(f, finish.scale, has_aux), argnums=argnums, has_aux=True, **options
        ),
        accumulators=grads == "accumulator",
    )

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with finish.scope():
            (_, (loss, aux)), gradients = differentiated(*args, **kwargs)
            gradients = _shared(finish(gradients), _places(gradients))
        return ((loss, aux) if has_aux else loss), gradients

    return value_and_gradients


def grad(
    f: Callable[..., Any] | None = None,
    argnums: ArgNums = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
    **options: Any,
) -> Callable[..., Any]:
    """Differentiates `f` as `value_and_grad` does, without returning the loss.

    Arguments and errors as in `value_and_grad`.

    Returns:
      A function that returns the gradients, or with `has_aux` the pair `(gradients, aux)`.

    Example:
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> nnx.grad(lambda model: model(jnp.ones((2, 4))).sum())(model)["bias"][...]
      Array([2., 2., 2.], dtype=float32)
    """
    options |= {"policy": policy, "loss_scale": loss_scale, "grads": grads}
    if f is None:
        return functools.partial(grad, argnums=argnums, has_aux=has_aux, **options)
    return without_loss(value_and_grad(f, argnums, has_aux, **options), has_aux)


def _with_float32_sums(
    differentiated: Callable[..., Any], *, accumulators: bool
) -> Callable[..., Any]:
    """Returns a function like Flax's `value_and_grad` of a loss, whose gradients are summed in
    float32.

    See `policy.grads.float32_sums`.

    Args:
      differentiated: Flax's function.
      accumulators: whether the gradients are accumulators of matmuls, too. Without it, a call whose
        params are float32 runs as Flax runs it.
    """

    @functools.wraps(differentiated)
    def summed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not (accumulators or _holds_half_params((args, kwargs))):
            return differentiated(*args, **kwargs)
        structure: list[Any] = []

        def flat(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
            value, gradients = differentiated(*args, **kwargs)
            leaves, treedef = jax.tree.flatten(gradients)
            structure[:] = treedef, _places(gradients)
            return value, leaves

        call = StatefulCall(flat, args, kwargs)
        traced = PureCall.of(call.inside(), *call.trees)
        value, leaves = traced.result.treedef.children()[0].children()
        before, count = value.num_leaves, leaves.num_leaves
        is_gradient = [
            before <= i < before + count for i, one in enumerate(traced.result.is_array) if one
        ]
        results = evaluated(traced.jaxpr, traced.arrays, is_gradient, accumulators=accumulators)
        value, gradients = call.finish(traced.returned(results))
        treedef, places = structure
        return value, _shared(jax.tree.unflatten(treedef, gradients), places)

    return summed


def _holds_half_params(tree: Any) -> bool:
    params = (node for _, node in nnx.iter_graph(tree) if isinstance(node, nnx.Param))
    return any(holds_half(leaf) for param in params for leaf in jax.tree.leaves(param))


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _places(gradients: Any) -> list[int]:
    """Returns for each Variable or other leaf where it occurs first."""
    first: dict[int, int] = {}
    nodes = jax.tree.leaves(gradients, is_leaf=_is_variable)
    return [
        first.setdefault(id(node), i) if _is_variable(node) else i for i, node in enumerate(nodes)
    ]


def _shared(gradients: Any, places: Sequence[int]) -> Any:
    """Returns a tree in which the Variables occur where `places` says."""
    nodes, structure = jax.tree.flatten(gradients, is_leaf=_is_variable)
    shared = [nodes[i] for i in places]
    return jax.tree.unflatten(structure, shared + nodes[len(places) :])


M = TypeVar("M")

_MISSING: Any = object()


class Optimizer(nnx.Optimizer[M]):
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


class ModelAndOptimizer(nnx.ModelAndOptimizer[M], Optimizer[M]):  # pyright: ignore[reportIncompatibleMethodOverride]
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

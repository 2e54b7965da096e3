"""Gradients under a policy and a loss scale: `value_and_grad` and `grad`.

Those of a large batch are computed from microbatches that fit into memory, and summed in float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.core.arrays import (
    is_inexact,
    is_overwritten,
    make_varying,
    map_gradients,
    nnx_files,
    path_name,
    varying_axes,
    working_dtype,
)
from policy.core.messages import dtype_and_shape, require_function, shortened, shown
from policy.core.policy import Policy, get_policy
from policy.core.scope import current_policy, use_policy
from policy.grads.float32_sums import with_float32_sums
from policy.grads.loss_scale import (
    LossScale,
    ScaledGradients,
    get_loss_scale,
    note_gradients,
    require_positive,
    scale_tree,
    unscale_tree,
)

T = TypeVar("T")
GradientKind = Literal["float32", "accumulator", "compute"]


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
) -> Callable[..., tuple[Any, Any]]:
    """Differentiates `loss_fn` as `jax.value_and_grad` does, under a policy and a loss scale.

    The loss is cast to float32 before it is scaled, and returned unscaled. Gradients accumulate
    over the uses of a parameter in float32, even if the parameter is stored in half precision;
    `policy.grads.float32_sums` says how. Leaves under a mapping key
    `_overwrite_with_gradient`, and aux, are left alone.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> loss_fn = lambda params: jnp.sum(jnp.square(params["w"]))
    >>> params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
    >>> loss, grads = policy.value_and_grad(loss_fn, loss_scale=1024.0)(params)
    >>> float(loss), grads["w"]
    (5.0, Array([2., 4.], dtype=float32))

    Args:
      loss_fn: returns a floating scalar, or with `has_aux` a pair `(loss, aux)`.
      argnums: the positional arguments to differentiate by, as in JAX.
      has_aux: whether `loss_fn` returns a pair.
      policy: a Policy or its text form, in force while `loss_fn` is traced. None keeps the policy
        in force.
      loss_scale: None, a loss scale such as `loss_scale_of(opt_state)`, or a positive number.
      grads: "float32" returns a plain tree: unscaled, float32 (float64 and complex leaves keep
        their dtype). "accumulator" returns the same tree, in which the gradient of a weight is the
        float32 accumulator of its matmul or convolution, where "float32" widens a rounded one; see
        `policy.grads.float32_sums`. "compute" returns `ScaledGradients`: still scaled,
        rounded once, at the end, to the policy's compute_dtype; not rounded if there is no policy
        or its compute_dtype is wider.

    Returns:
      A function of `loss_fn`'s arguments that returns `(loss, gradients)` or `((loss, aux),
      gradients)`.

    Raises:
      ValueError: `grads` is unknown, or the scale not positive or a text such as "dynamic".
      TypeError: `loss_fn` is not a function, or `argnums` are not positions; on the call, the loss
        is not a floating scalar, or an argument to differentiate by holds integers, PRNG keys or
        nnx references.
    """
    _require_loss(loss_fn, argnums)
    finish = Finish(policy, loss_scale, grads)

    @functools.wraps(loss_fn)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        positions = _positions(argnums, len(args))
        for position in positions:
            _require_differentiable(args[position], position)
        with finish.scope():
            (_, (loss, aux)), gradients = with_float32_sums(
                jax.value_and_grad(
                    scaled_loss(loss_fn, finish.scale, has_aux), argnums, has_aux=True
                ),
                positions,
                args,
                kwargs,
                accumulators=grads == "accumulator",
            )
            gradients = finish(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    return value_and_gradients


def grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | ArrayLike | None = None,
    grads: GradientKind = "float32",
) -> Callable[..., Any]:
    """Differentiates `loss_fn` as `value_and_grad` does, without returning the loss.

    Arguments and errors as in `value_and_grad`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.grad(lambda w: jnp.sum(w * w))(jnp.array([1.0, 3.0], jnp.bfloat16))
    Array([2., 6.], dtype=float32)

    Returns:
      A function that returns the gradients, or with `has_aux` the pair `(gradients, aux)`.
    """
    differentiated = value_and_grad(
        loss_fn, argnums, has_aux, policy=policy, loss_scale=loss_scale, grads=grads
    )

    @functools.wraps(loss_fn)
    def gradients_only(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradients_only


class Finish:
    """Turns raw gradients into unscaled ones or `ScaledGradients`, for both wings.

    Attributes:
      policy: in force while the loss is traced, or None.
      scale: the () scale, a Python number or an array.
      grads: "float32", "accumulator" or "compute".
      has_scale: whether a loss scale was given.
    """

    def __init__(self, policy: Policy | str | None, loss_scale: Any, grads: GradientKind):
        """Checks the three arguments. Raises as `value_and_grad` says."""
        if grads not in get_args(GradientKind):
            kinds = " or ".join(map(repr, get_args(GradientKind)))
            raise ValueError(f"grads should be {kinds}, but got {grads!r}.")
        self.policy = None if policy is None else get_policy(policy)
        self.scale = _scale_value(loss_scale)
        self.grads, self.has_scale = grads, loss_scale is not None

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.policy is None else use_policy(self.policy)

    def __call__(self, gradients: Any) -> Any:
        if self.grads == "compute":
            policy = self.policy or current_policy()
            compute_dtype = jnp.dtype(jnp.float32) if policy is None else policy.compute_dtype

            def narrow(gradient: jax.Array) -> jax.Array:
                if not jnp.issubdtype(gradient.dtype, jnp.floating):
                    return gradient
                working = working_dtype(gradient.dtype)
                is_narrower = compute_dtype.itemsize < working.itemsize
                return gradient.astype(compute_dtype if is_narrower else working)

            return ScaledGradients(map_gradients(narrow, gradients), self.scale)
        unscaled = map_gradients(lambda g: unscale_tree(g, self.scale), gradients)
        return note_gradients(unscaled, were_scaled=self.has_scale)


def scaled_loss(loss_fn: Callable[..., Any], scale: ArrayLike, has_aux: bool) -> Callable[..., Any]:
    """Returns `loss_fn` with the result `(scaled float32 loss, (loss, aux))`.

    The new function raises TypeError if the loss is not a floating scalar.
    """

    @functools.wraps(loss_fn)
    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        returned = loss_fn(*args, **kwargs)
        if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
            length = f" of {len(returned)}" if isinstance(returned, tuple) else ""
            raise TypeError(
                "With has_aux=True loss_fn should return a pair (loss, aux), but got "
                f"{type(returned).__name__}{length}."
            )
        loss, aux = returned if has_aux else (returned, None)
        is_number = isinstance(loss, (jax.Array, np.ndarray, np.generic, float, complex))
        if not is_number or jnp.ndim(loss) or not is_inexact(loss):  # JAX takes complex, or not
            raise TypeError(
                f"loss_fn should return a floating scalar, but got {dtype_and_shape(loss)}: return "
                "the mean or the sum, and use has_aux=True to return more."
            )
        loss = jnp.asarray(loss)
        loss = loss.astype(working_dtype(loss.dtype))  # before the scale: float16 ends at 65504
        return scale_tree(loss, scale), (loss, aux)

    return scaled


def _require_loss(loss_fn: Any, argnums: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn should be a function, but got {type(loss_fn).__name__}: pass the function "
            "itself, and its arguments to the result, value_and_grad(loss_fn)(params, batch)."
        )
    positions = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not positions or not all(
        isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in positions
    ):
        raise TypeError(
            "argnums should be the position of an argument, or several, but got "
            f"{shown(argnums)}: pass arguments to the result, value_and_grad(loss_fn)(params, "
            "batch), and a policy as policy=."
        )


def _scale_value(loss_scale: Any) -> ArrayLike:
    """Returns the () scale, possibly traced, of a number or a loss scale (ours or similar)."""
    if isinstance(loss_scale, str):  # "dynamic" would stay at its first value
        raise ValueError(
            f"loss_scale should be a loss scale or a number, but got {loss_scale!r}: write "
            "mixed_precision(..., loss_scale='dynamic'), and pass "
            "loss_scale=loss_scale_of(opt_state) here."
        )
    if isinstance(loss_scale, (jax.Array, np.ndarray)):
        scale = loss_scale
    elif hasattr(loss_scale, "loss_scale") and not isinstance(loss_scale, type):
        scale = loss_scale.loss_scale
        if hasattr(scale, "adjust"):  # a whole state, or a mixed_precision
            raise TypeError(
                f"loss_scale should be a loss scale, but got a {type(loss_scale).__name__}, which "
                "holds one: pass loss_scale=loss_scale_of(opt_state)."
            )
    else:
        given: Any = loss_scale  # of a class, too: it is refused by name
        scale = get_loss_scale(given).loss_scale
    require_positive(scale)
    if jnp.ndim(scale):
        raise ValueError(f"loss_scale should be a scalar, but got shape {jnp.shape(scale)}.")
    return scale


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    asked = argnums if isinstance(argnums, Sequence) else (argnums,)
    for position in asked:
        if not -count <= position < count:
            raise TypeError(
                f"argnums={argnums} selects positional argument {position}, but the call has "
                f"{count} positional arguments: pass it by position, not by keyword."
            )
    return tuple(position % count for position in asked)


def _require_differentiable(argument: Any, position: int) -> None:
    references: list[str] = []

    def is_leaf(node: Any) -> bool:
        files = nnx_files(node)
        if files and "flax.nnx.statelib" not in files:  # a State is a plain tree of copies
            references.append(type(node).__name__)
        return bool(files)

    leaves = jax.tree_util.tree_leaves_with_path(argument, is_leaf=is_leaf)
    if references:
        raise TypeError(
            f"Argument {position} holds nnx references ({references[0]}), and the values that "
            "loss_fn writes to them (BatchNorm statistics, RNG counts) would be lost. Use "
            "mpmodules.nnx.value_and_grad, or split the model and pass its state."
        )
    wrong = [
        f"{path_name(path)} ({dtype_and_shape(leaf)})"
        for path, leaf in leaves
        if not (is_leaf(leaf) or is_overwritten(path))
        if not (hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex)))
        or not is_inexact(leaf)
    ]
    if wrong:
        raise TypeError(
            f"Argument {position} holds leaves that have no gradient: {', '.join(wrong)}. Pass "
            "integers, booleans and PRNG keys as another argument, outside of argnums."
        )


# --------------------------------------------------------------------------------------------------
# Microbatches
# --------------------------------------------------------------------------------------------------


def split_batch(batch: T, count: int) -> T:
    """Splits a batch into `count` microbatches: each leaf (B, ...) becomes (count, B / count, ...).

    Microbatch i holds examples i, i + count, i + 2 count, ..., so that a batch sharded over its
    examples stays in place.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.grads.split_batch({"x": jnp.arange(6)}, 2)
    {'x': Array([[0, 2, 4],
           [1, 3, 5]], dtype=int32)}

    Args:
      batch: a tree of arrays that share their first axis.
      count: the number of microbatches.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: `count` is not a positive integer; or leaves differ in their first axis, or it is
        not a multiple of `count`.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            "count should be a whole number of microbatches of at least 1, but got "
            f"{shown(count)}: call split_batch(batch, count)."
        )
    length = _first_axis(batch, "batch")
    if length % count:
        raise ValueError(
            f"The first axis of batch should be a multiple of {count}, but is {length}."
        )
    return jax.tree.map(
        lambda x: jnp.swapaxes(jnp.reshape(x, (-1, count, *jnp.shape(x)[1:])), 0, 1), batch
    )


def accumulate_gradients(
    value_and_grad_fn: Callable[[Any, Any], tuple[Any, Any]],
    params: Any,
    microbatches: Any,
    *,
    weights: ArrayLike | Sequence[float] | None = None,
) -> tuple[Any, Any]:
    """Computes mean loss and gradients over microbatches, with the memory of one backward pass.

    The microbatches run in a `lax.scan`. Sums are float32, also if each microbatch's gradients are
    narrower: ``grads = sum_k w_k g_k / sum_k w_k``. A non-finite microbatch makes the mean
    non-finite, and the step is skipped. Across devices, `vary` the params first and `all_reduce`
    the result, so that gradients are exchanged once per step, not once per microbatch.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> loss_fn = lambda params, batch: jnp.mean(params["w"] * batch)
    >>> batches = policy.grads.split_batch(jnp.arange(4.0), 2)
    >>> step = policy.value_and_grad(loss_fn)
    >>> loss, grads = policy.grads.accumulate_gradients(step, {"w": jnp.float32(2)}, batches)
    >>> float(loss), float(grads["w"])
    (3.0, 1.5)

    Args:
      value_and_grad_fn: called with `params` and a microbatch; a function from `value_and_grad`,
        with or without `has_aux` and with either kind of gradients, or from JAX's.
      params: a tree, passed on.
      microbatches: a tree whose leaves have a first axis of K microbatches; keys for dropout are a
        leaf of it.
      weights: (K,) the weight of each microbatch, such as its number of tokens if the loss is a
        mean over tokens. None weighs all alike. They apply on one device only: `all_reduce` takes
        the plain mean over devices. A microbatch of weight 0 is left out, even if it is not finite:
        the mean of no tokens is NaN.

    Returns:
      `(loss, gradients)`, or `((loss, aux), gradients)` with each leaf of aux stacked, (K, ...).
      `ScaledGradients` keep their scale and are rounded once, to the dtype of each microbatch's
      gradients; a plain tree is float32 or wider. Leaves under `_overwrite_with_gradient` are not
      gradients: the result is the largest of the microbatches' new values, which equals the whole
      batch's for fp8 scales and amax histories.

    Raises:
      ValueError: `microbatches` has no leaf, or leaves that differ in their first axis; `weights`
        is not (K,).
      TypeError: `value_and_grad_fn` is not a function, or doesn't return `(value, gradients)`;
        `params` holds an nnx model.
    """
    require_function(value_and_grad_fn, "accumulate_gradients")
    _refuse_models(params)
    count = _first_axis(microbatches, "microbatches")
    weights = None if weights is None else jnp.asarray(weights, jnp.float32)
    if weights is not None and weights.shape != (count,):
        raise ValueError(
            f"weights should have shape ({count},), one for each microbatch, but got "
            f"{weights.shape}."
        )

    def body(sums: Any, turn: tuple[Any, Any]) -> tuple[Any, Any]:
        microbatch, weight = turn
        new, stacked = _divided(value_and_grad_fn(params, microbatch))
        return jax.tree_util.tree_map_with_path(lambda *x: _add(weight, *x), sums, new), stacked

    like, _ = jax.eval_shape(
        lambda p, m: _divided(value_and_grad_fn(p, jax.tree.map(lambda x: x[0], m))),
        params,
        microbatches,
    )
    weight_axes = frozenset() if weights is None else varying_axes(weights)
    start = jax.tree_util.tree_map_with_path(lambda path, x: _zero(path, x, weight_axes), like)
    sums, (aux, scales) = lax.scan(body, start, (microbatches, weights))
    total = jnp.float32(count) if weights is None else jnp.sum(weights)
    loss, gradients = map_gradients(lambda x: x / total.astype(x.dtype), sums)
    if scales:
        gradients = map_gradients(lambda x, kind: x.astype(kind.dtype), gradients, like[1])
        gradients = ScaledGradients(gradients, _common(*scales))
    return ((loss, *aux) if aux else loss), gradients


def _divided(returned: Any) -> tuple[tuple[Any, Any], tuple[list[Any], list[Any]]]:
    """Divides the results of one microbatch into summed and stacked parts.

    Returns:
      `(loss, gradients)`, and the aux and the scale, each in a list that is empty without one.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            "value_and_grad_fn should return (value, gradients), as value_and_grad(loss_fn) "
            f"does, but got {type(returned).__name__}."
        )
    value, gradients = returned
    loss, *aux = value if isinstance(value, tuple) else (value,)
    if isinstance(gradients, ScaledGradients):
        return (loss, gradients.tree), (aux, [gradients.scale])
    return (loss, gradients), (aux, [])


def _common(scales: jax.Array) -> jax.Array:
    """Returns the () scale shared by all (K,).

    Gradients of different scales have no sum: raises if they differ, or returns NaN if that is
    known at run time only.
    """
    same = jnp.all(scales == scales[0])
    if not isinstance(same, Tracer) and not same:
        raise ValueError(f"The microbatches' gradients should share one scale, but got {scales}.")
    return jnp.where(same, scales[0], jnp.nan)


def _zero(path: Any, like: Any, more_axes: frozenset[Any]) -> jax.Array:
    """Returns the start of a sum or maximum, with the sharding and varying type of the result."""
    if is_overwritten(path):
        start, axes = jnp.full(like.shape, -jnp.inf, like.dtype), varying_axes(like)
    else:
        start = jnp.zeros(like.shape, working_dtype(like.dtype))
        axes = varying_axes(like) | more_axes
    start = make_varying(start, axes)
    sharding = jax.typeof(like).sharding  # under a mesh of explicit axes
    is_sharded = any(axis is not None for axis in sharding.spec)
    return jax.reshard(start, sharding) if is_sharded else start


def _add(weight: Any, path: Any, total: jax.Array, x: jax.Array) -> jax.Array:
    if is_overwritten(path):
        return jnp.maximum(total, x)
    x = x.astype(total.dtype)
    if weight is None:
        return total + x
    return total + jnp.where(weight == 0, jnp.zeros_like(x), x * weight.astype(x.dtype))


def _refuse_models(params: Any) -> None:
    """Raises for nnx models, whose Variables a scan can not update."""
    is_model = lambda node: "flax.nnx.module" in nnx_files(node)  # noqa: E731
    models = [node for node in jax.tree.leaves(params, is_leaf=is_model) if is_model(node)]
    if models:
        raise TypeError(
            "accumulate_gradients takes params that are arrays, but got an nnx model "
            f"({type(models[0]).__name__}). Split it: graphdef, params, rest = nnx.split(model, "
            "nnx.Param, ...), and let the loss call nnx.merge(graphdef, params, rest, copy=True)."
        )


def _first_axis(tree: Any, name: str) -> int:
    """Returns the length of the first axis, which all leaves share and which is not 0."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lengths = {jnp.shape(leaf)[:1] for _, leaf in leaves}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        shapes = [f"{path_name(path)} {tuple(jnp.shape(leaf))}" for path, leaf in leaves]
        raise ValueError(
            f"{name} should hold arrays that share their first axis, of 1 or more, but got "
            f"{shortened(shapes) or 'no array'}. split_batch(batch, count) makes microbatches from "
            "a batch."
        )
    return lengths.pop()[0]

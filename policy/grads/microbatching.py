"""Gradients that are summed in float32 over the microbatches of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.core.arrays import (
    is_overwritten,
    make_varying,
    map_gradients,
    nnx_files,
    path_name,
    varying_axes,
    working_dtype,
)
from policy.core.messages import require_function, shortened, shown
from policy.grads.loss_scale import ScaledGradients
from policy.programs.jaxprs import equations_within

T = TypeVar("T")


def split_batch(batch: T, count: int) -> T:
    """Splits a batch into `count` microbatches: each leaf (B, ...) becomes (count, B / count, ...).

    Microbatch i holds examples i, i + count, i + 2 count, ..., so that a batch sharded over its
    examples stays in place.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.split_batch({"x": jnp.arange(6)}, 2)
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
    >>> batches = policy.split_batch(jnp.arange(4.0), 2)
    >>> step = policy.value_and_grad(loss_fn)
    >>> loss, grads = policy.accumulate_gradients(step, {"w": jnp.float32(2)}, batches)
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
    _reject_models(params)
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
        new = jax.tree.map(apart, new)
        return jax.tree_util.tree_map_with_path(lambda *x: _add(weight, *x), sums, new), stacked

    first = lambda p, m: _divided(value_and_grad_fn(p, jax.tree.map(lambda x: x[0], m)))  # noqa: E731
    program, (like, _) = jax.make_jaxpr(first, return_shape=True)(params, microbatches)
    scattered = _shapes_of_scatters(program)
    apart = lambda x: lax.optimization_barrier(x) if x.shape in scattered else x  # noqa: E731
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


def _shapes_of_scatters(program: Any) -> frozenset[tuple[int, ...]]:
    """Returns the shapes of sums over indices, such as an embedding's gradient, that XLA loses.

    XLA writes `total + scatter-add(0, ...)` as a scatter to the total. Where a batch is sharded,
    the compilers of jax 0.10 and 0.11 for TPUs and GPUs then move the exchange out of the loop, and
    all devices of a group but the first drop the total: openxla/xla#49143, mended in jax 0.12.
    """
    if jax.__version_info__ >= (0, 12):
        return frozenset()
    sums = (
        e for e in equations_within(program.jaxpr, once=True) if e.primitive.name == "scatter-add"
    )
    return frozenset(equation.outvars[0].aval.shape for equation in sums)


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


def _reject_models(params: Any) -> None:
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

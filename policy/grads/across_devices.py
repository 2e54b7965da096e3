"""Gradients across devices: the dtype and the place of their sums.

Under `jax.shard_map`, backward sums the gradient of a param over the devices at the point where the
param became device-varying, in the dtype that it had there. `vary` moves that point, and so decides
the dtype, or it leaves gradients on their device for `all_reduce` to sum once. Under `jax.jit` with
sharded arrays the partitioner sums in the result dtype of the weight gradient's dot. Nothing here
reaches that sum; `collectives_of` shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import (
    is_inexact,
    is_overwritten,
    is_typed,
    make_varying,
    path_name,
    require_available,
    varying_axes,
    working_dtype,
)
from policy.core.dtypes import parse_dtype
from policy.core.messages import shortened
from policy.grads.loss_scale import ScaledGradients
from policy.programs.marks import EXCHANGE

T = TypeVar("T")
AxisName: TypeAlias = Hashable | Sequence[Hashable]


def vary(params: T, axis: AxisName, all_reduce_dtype: DTypeLike | None = None) -> T:
    """Makes `params` device-varying; decides where and how their gradients are summed.

    ``vary(params, "data")``, before `value_and_grad`: gradients stay on their device. Reduce them
    with `all_reduce`, once for all microbatches.

    ``vary(params, "data", "bfloat16")``, inside the loss: backward casts the gradient of each param
    to that dtype, sums it over the axis, and returns it. This is the exact gradient of the code, so
    it sums over the devices' losses: take `lax.pmean` of the loss, which also divides before the
    sum, where float16 would overflow.

    Leaves under `_overwrite_with_gradient` take the largest of the devices' new values, as in
    `all_reduce`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> def gradient(w, x):  # one device's, of its part of the batch
    ...     grads = policy.grad(lambda w: jnp.sum(w * x))(policy.sharding.vary(w, "data"))
    ...     return policy.sharding.all_reduce(grads, "data", "bfloat16")
    >>> step = jax.vmap(gradient, in_axes=(None, 0), axis_name="data")
    >>> step(jnp.float32(1), jnp.array([1.0, 3.0]))
    Array([2., 2.], dtype=float32)

    Args:
      params: a tree. Floating and complex leaves become varying, others are unchanged, as are
        leaves that vary over the axis already.
      axis: a mapped axis of `jax.shard_map` or `jax.vmap`, or a sequence of them.
      all_reduce_dtype: the dtype that gradients are summed in. None leaves it to `all_reduce`, or
        to JAX if the differentiated params aren't the varying ones.

    Raises:
      ValueError: an axis is not mapped here, or gradients can't be summed in the dtype.
    """
    axes = _as_axes(axis)
    typed = frozenset(a for a in axes if is_typed(a))
    dtype = None if all_reduce_dtype is None else _reducing_dtype(all_reduce_dtype)

    def one(path: Any, leaf: Any) -> Any:
        if not is_inexact(leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        missing = tuple(a for a in axes if a not in varying_axes(leaf))
        if not missing:
            return leaf
        if dtype is None:
            return make_varying(leaf, frozenset(missing))
        return _reducing_vary(missing, typed.intersection(missing), dtype, is_overwritten(path))(
            leaf
        )

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def _reducing_vary(
    axes: tuple[Any, ...], typed: frozenset[Any], dtype: np.dtype, overwritten: bool
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that makes an array vary over `axes`; backward reduces in `dtype`."""

    @jax.custom_vjp
    def move(x: jax.Array) -> jax.Array:
        return make_varying(x, typed)

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if overwritten:
            return (lax.pmax(cotangent, axes),)
        floating = jnp.issubdtype(cotangent.dtype, jnp.floating)
        with jax.named_scope(EXCHANGE):
            total = lax.psum(cotangent.astype(dtype) if floating else cotangent, axes)
        return (total.astype(cotangent.dtype),)

    move.defvjp(lambda x: (move(x), None), backward)
    return move


def all_reduce(grads: T, axis: AxisName, dtype: DTypeLike) -> T:
    """Returns the mean of each device's own gradients over a mapped axis, summed in `dtype`.

    ``mean = sum over devices of cast(g / devices)``: the division, in float32, precedes the cast
    and the sum, so that the mean of 8 float16 gradients of 20000 is finite; it costs no pass of its
    own. Each leaf is rounded to `dtype` once.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> mean = lambda g: policy.sharding.all_reduce(g, "data", "float16")
    >>> jax.vmap(mean, axis_name="data")(jnp.array([20000.0, 60000.0]))
    Array([40000., 40000.], dtype=float32)

    Args:
      grads: `ScaledGradients`, which keep their scale and are returned in `dtype`, for the step to
        read; or a plain tree, which is returned in float32 (float64 stays float64), as plain
        gradients are. Complex leaves keep their dtype. Leaves under `_overwrite_with_gradient` are
        not gradients: they take the largest of the devices' new values, which equals one device's
        result on the whole batch for fp8 scales and amax histories.
      axis: a mapped axis of `jax.shard_map` or `jax.vmap`, or a sequence of them.
      dtype: float32, bfloat16, float16 or float64.

    Raises:
      ValueError: an axis is not mapped here; gradients can't be summed in the dtype; or the
        gradients' type says that they are equal on every device of the axis, because backward has
        summed them already.
    """
    axes, dtype = _as_axes(axis), _reducing_dtype(dtype)
    if isinstance(grads, ScaledGradients):
        return grads.with_tree(_all_reduced(grads.tree, axes, dtype, keep=True))
    return _all_reduced(grads, axes, dtype, keep=False)


def _all_reduced(tree: Any, axes: tuple[Any, ...], dtype: np.dtype, *, keep: bool) -> Any:
    _require_varying(tree, axes)
    devices = np.prod([lax.axis_size(a) for a in axes], dtype=np.int64)

    def one(path: Any, leaf: Any) -> Any:
        if not is_inexact(leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        if is_overwritten(path):
            return lax.pmax(leaf, axes)
        working = working_dtype(leaf.dtype)
        share = leaf.astype(working) / jnp.asarray(devices, working)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return lax.psum(share, axes)
        total = lax.psum(share.astype(dtype), axes)
        return total if keep else total.astype(working)

    return jax.tree_util.tree_map_with_path(one, tree)


def _require_varying(tree: Any, axes: tuple[Any, ...]) -> None:
    typed = {a for a in axes if is_typed(a)}
    same = [
        path_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_inexact(leaf) and typed - varying_axes(leaf)
    ]
    if same:
        names = ", ".join(sorted(map(repr, typed)))
        raise ValueError(
            f"grads should be each device's own, but {shortened(same)} are the same over "
            f"{names}: the backward pass summed them already, where the params became "
            "device-varying. Differentiate with respect to vary(params, axis) instead."
        )


def _as_axes(axis: AxisName) -> tuple[Any, ...]:
    return tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)


def _reducing_dtype(dtype: DTypeLike) -> np.dtype:
    found = parse_dtype(dtype) if isinstance(dtype, str) else jnp.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(
            f"Gradients are summed in a floating dtype of 16 bits or more, but got {found.name}."
        )
    return require_available(found)

"""Gradients across devices: in which dtype they are summed, and where.

Under `jax.shard_map` backward sums the gradient of a param over the devices at the point where the param became
device-varying, in the dtype that it had there. `vary` moves that point, and so decides the dtype; or it leaves
gradients on their device, for `all_reduce` to sum once. Under `jax.jit` with sharded arrays the partitioner sums, in
the dtype of what the weight gradient's dot returns: nothing here reaches it, and `collectives_of` shows what it was.
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

from policy.casting import require_available
from policy.grads.float32_cotangents import MOVING_JITS
from policy.grads.value_and_grad import ScaledGradients
from policy.policy import parse_dtype
from policy.trees import is_inexact, is_overwritten, path_name, shortened, working_dtype

T = TypeVar("T")
Axis: TypeAlias = Hashable | Sequence[Hashable]


def varying_axes(x: Any) -> frozenset[Any]:
    """The mapped axes over which the type of `x` says that devices hold different values. None where nothing is said.

    Types say so inside `jax.shard_map`, unless it was told `check_vma=False`; under `jax.vmap` they don't.
    """
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def is_typed(axis: Hashable) -> bool:
    """Returns whether the types of arrays say which vary over a mapped axis.

    Raises:
      ValueError: the axis is not mapped here.
    """
    try:
        index = lax.axis_index(axis)
    except NameError:
        raise ValueError(
            f"axis {axis!r} is not mapped here: call it inside jax.shard_map or jax.vmap over that axis. Under jax.jit "
            "with sharded arrays name none: XLA reduces over the devices by itself."
        ) from None
    return axis in varying_axes(index)


def make_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """`x`, of a type that varies over `axes` too, as far as types say such things."""
    missing = tuple(sorted((a for a in axes - varying_axes(x) if is_typed(a)), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary(params: T, axis: Axis, all_reduce_dtype: DTypeLike | None = None) -> T:
    """`params`, the same numbers, as values of each device: decides where and how their gradients are summed.

    ``vary(params, "data")``, before `value_and_grad`: gradients stay on their device. Reduce them with `all_reduce`,
    once for all microbatches.

    ``vary(params, "data", "bfloat16")``, inside the loss: backward casts the gradient of each param to that dtype, sums
    it over the axis, and returns it. It is the gradient of what was written, so a sum over the
    devices' losses: take `lax.pmean` of the loss, which also divides before the sum, where float16 would overflow.

    What lies under `_overwrite_with_gradient` takes the largest of the devices' new values, as in `all_reduce`.

    Args:
      params: a tree. Floating and complex leaves become varying, others stay. A leaf that varies over the axis already
        stays as it is.
      axis: a mapped axis of `jax.shard_map` or `jax.vmap`, or a sequence of them.
      all_reduce_dtype: what gradients are summed in; None leaves it open: `all_reduce` decides, or JAX where the
        differentiated params aren't the varying ones.

    Raises:
      ValueError: an axis that is not mapped here, or a dtype that gradients can't be summed in.
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
        return _reducing_vary(missing, typed.intersection(missing), dtype, is_overwritten(path))(leaf)

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def _reducing_vary(
    axes: tuple[Any, ...], typed: frozenset[Any], dtype: np.dtype, overwritten: bool
) -> Callable[[jax.Array], jax.Array]:
    """A function that makes an array vary over `axes`, and whose backward reduces over them in `dtype`.

    It is jitted for its name, by which `value_and_grad` knows that a param's gradient goes through it in float32.
    """

    @jax.custom_vjp
    def move(x: jax.Array) -> jax.Array:
        return make_varying(x, typed)

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if overwritten:
            return (lax.pmax(cotangent, axes),)
        floating = jnp.issubdtype(cotangent.dtype, jnp.floating)
        return (lax.psum(cotangent.astype(dtype) if floating else cotangent, axes).astype(cotangent.dtype),)

    def vary(x: jax.Array) -> jax.Array:
        return move(x)

    move.defvjp(lambda x: (move(x), None), backward)
    name = ".".join(["vary", *map(str, axes), "max" if overwritten else dtype.name])  # dots: no other function's name
    while name in MOVING_JITS:  # of other axes of that name, or elsewhere typed
        name += "."
    vary.__name__ = name
    MOVING_JITS[vary.__name__] = move
    return jax.jit(vary)


def all_reduce(grads: T, axis: Axis, dtype: DTypeLike) -> T:
    """The mean over a mapped axis of each device's own gradients, summed in `dtype`.

    ``mean = sum over devices of cast(g / devices)``: the division, in float32, comes before the cast and the sum, so
    that 8 float16 gradients of 20000 have a mean, and costs no pass of its own. Each leaf is rounded to `dtype` once.

    Args:
      grads: `ScaledGradients`, which keep their scale and come back in `dtype`, for the step to read; or a plain tree,
        which comes back in float32 (float64 where it was), as plain gradients are. Complex leaves keep their dtype.
        What lies under `_overwrite_with_gradient` is no gradient: it takes the largest of the devices' new values,
        which for fp8's scales and histories of maxima is what one device would have found in the whole batch.
      axis: a mapped axis of `jax.shard_map` or `jax.vmap`, or a sequence of them.
      dtype: float32, bfloat16, float16 or float64.

    Raises:
      ValueError: an axis that is not mapped here; a dtype that gradients can't be summed in; gradients whose type says
        that they are the same on every device of the axis: backward has summed them already.
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
        raise ValueError(
            f"grads should be each device's own, but {shortened(same)} are the same all over {_names(typed)}: backward "
            "summed them where the params became device-varying. Differentiate by vary(params, axis) instead."
        )


def _as_axes(axis: Axis) -> tuple[Any, ...]:
    return tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)


def _reducing_dtype(dtype: DTypeLike) -> np.dtype:
    found = parse_dtype(dtype) if isinstance(dtype, str) else jnp.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(f"Gradients are summed in a floating dtype of 16 bits or more, but got {found.name}.")
    return require_available(found)


def _names(axes: Any) -> str:
    return ", ".join(sorted(map(repr, axes)))

"""Mapped axes of `jax.shard_map` and `jax.vmap`, and arrays whose types vary over them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mapped axes over which, by the type of `x`, devices hold different values.

    Types say so inside `jax.shard_map`, unless it was told `check_vma=False`; under `jax.vmap` they
    don't.
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
            f"axis {axis!r} is not mapped here: call the function inside jax.shard_map or jax.vmap "
            "over that axis. Under jax.jit with sharded arrays, pass no axis: XLA reduces over the "
            "devices by itself."
        ) from None
    return axis in varying_axes(index)


def alike_varying(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays with types that vary over the mapped axes of all of them.

    Operations of JAX do so by themselves; the cotangents of a rule of one's own have to vary as its
    arguments do.
    """
    axes = frozenset[Any]().union(*map(varying_axes, arrays))
    return [make_varying(x, axes) for x in arrays]


def make_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns `x` with a type that varies over `axes` too, where types tell."""
    missing = tuple(sorted((a for a in axes - varying_axes(x) if is_typed(a)), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x

"""Reshapes of arrays whose types say how they are sharded, on a mesh of explicit axes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Spec = tuple[Any, ...]


def explicit_spec(x: jax.Array) -> Spec:
    """Returns the names of the mesh axes that each axis of `x` is sharded over by its type.

    They are None off a mesh of explicit axes.
    """
    spec = jax.typeof(x).sharding.spec if _is_explicit(x) else ()
    return (*spec, *[None] * (x.ndim - len(spec)))


def with_spec(x: jax.Array, spec: Spec) -> jax.Array:
    """Returns `x` sharded over the mesh axes of `spec`, on a mesh of explicit axes."""
    return jax.reshard(x, PartitionSpec(*spec)) if _is_explicit(x) else x


def reshape(x: jax.Array, shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """Returns `x` in another shape, on a mesh of explicit axes sharded over those of `spec`.

    An axis whose length they don't divide is replicated.
    """
    if not _is_explicit(x):
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh
    fits = [n % _devices(mesh, axes) == 0 for n, axes in zip(shape, spec, strict=True)]
    kept = [axes if is_fit else None for axes, is_fit in zip(spec, fits, strict=True)]
    return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*kept)))


def _is_explicit(x: jax.Array) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _devices(mesh: Any, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))

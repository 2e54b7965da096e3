"""Optimizer states in the host's memory: the leaves that lie there, and copies of them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Sharding

MemoryKind: TypeAlias = Literal["pinned_host"]
"""JAX's name of the host's memory that a device copies from and to by itself."""

T = TypeVar("T")


def lies_on_host(leaf: Any) -> bool:
    """Returns whether a leaf of a state lies in the host's memory, where the state does.

    Counts, flags and the loss scale stay on the device, where the next step reads them. So do
    arrays of 8 or fewer bits an element: XLA:TPU compiles no copies of them (libtpu 0.0.42).
    """
    is_extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return jnp.ndim(leaf) > 0 and not is_extended and leaf.dtype.itemsize > 1


def is_on_host(tree: Any) -> bool:
    """Returns whether a leaf lies in the host's memory, by its type."""
    return any(_space(leaf) == jax.memory.Space.Host for leaf in jax.tree.leaves(tree))


def on_device(tree: T, kind: MemoryKind | None = None) -> T:
    """Copies leaves of a state from the host's memory to the device's.

    With a `kind`, all that `lies_on_host`: a `jax.ShapeDtypeStruct` whose sharding is of the host's
    memory is traced with the type of an array on the device.
    """

    def one(x: jax.Array) -> jax.Array:
        is_there = _space(x) == jax.memory.Space.Host or (kind is not None and lies_on_host(x))
        return jax.device_put(x, jax.memory.Space.Device) if is_there else x

    return jax.tree.map(one, tree)


def on_host(tree: T) -> T:
    """Copies leaves of a state to the host's memory, as `lies_on_host` tells."""
    space = jax.memory.Space.Host
    return jax.tree.map(lambda x: jax.device_put(x, space) if lies_on_host(x) else x, tree)


def _space(leaf: Any) -> Any:
    return getattr(jax.typeof(leaf), "memory_space", None) if isinstance(leaf, jax.Array) else None


def with_memory_kind(sharding: Sharding | None, kind: MemoryKind | None, leaf: Any) -> Any:
    """Returns the sharding of a leaf of a state that lies in this kind of memory."""
    if kind is None or sharding is None or not lies_on_host(leaf):
        return sharding
    return sharding.with_memory_kind(kind)


def require_memory(kind: MemoryKind | None, params: Any) -> None:
    """Rejects a kind of memory that the devices of params don't have.

    Traced params, and shapes without shardings, stand for the default device.

    Raises:
      ValueError: by the kind, and those that there are.
    """
    if kind is None:
        return
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    concrete = [x for x in leaves if not isinstance(x, Tracer)]
    device = next(iter(concrete[0].devices())) if concrete else jax.devices()[0]
    if kind not in (kinds := _kinds_of(device)):
        raise ValueError(
            f"state_memory_kind should be a memory of the params' device, but got {kind!r}, and "
            f"{device} has {', '.join(kinds)}: leave state_memory_kind out."
        )


def _kinds_of(device: Any) -> list[str]:
    return sorted(memory.kind for memory in device.addressable_memories())

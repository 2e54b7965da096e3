"""Attention kernels over sharded arrays: `jax.shard_map` over the axes of batch and heads.

XLA can't partition a kernel. Within `jax.shard_map` a kernel sees one shard, which is whole: no
query attends to a key of another example, or of another key head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, PartitionSpec

Array = jax.Array
Names = tuple[str, ...]

_BATCH, _HEADS = ("activation_batch", "batch"), ("activation_heads", "heads")


@dataclasses.dataclass(frozen=True)
class Shards:
    """The axes of a mesh that split attention's operands.

    Attributes:
      mesh: the mesh of arrays with explicit axes; None is that of the context.
      names: all axes that are not manual yet, of more than one device.
      batch: for each batch axis of an array, the mesh axes that split it.
      heads: the mesh axes that split the heads.
      repeats: how often each key head is repeated, so that the shards of heads have equally many.
    """

    mesh: Any
    names: Names
    batch: tuple[Names, ...]
    heads: Names
    repeats: int

    def map(
        self,
        run: Callable[..., Any],
        operands: Sequence[Array],
        results: Any,
        biases: Sequence[Array] = (),
        checks: bool = True,
    ) -> Any:
        """Calls `run(*operands, *biases)` on each shard.

        Args:
          run: a kernel.
          operands: (B..., T, N, H), (B..., N, T) or (B..., T), as their numbers of axes say.
          results: the numbers of axes of the results, a tree.
          biases: biases and masks, (B or 1..., N or 1, T, S).
          checks: whether JAX checks over which axes results vary.
        """
        specs = *(self._spec(x.ndim) for x in operands), *map(self._bias_spec, biases)
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=jax.tree.map(self._spec, results),
            axis_names=set(self.names),
            check_vma=checks,
        )
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
        arrays = zip((*operands, *biases), specs, strict=True)
        return mapped(*(_resharded(x, spec, explicit) for x, spec in arrays))

    def _bias_spec(self, bias: Array) -> PartitionSpec:
        split = zip((*self.batch, self.heads), bias.shape, strict=False)
        return PartitionSpec(*(axes if axes and size != 1 else None for axes, size in split))

    def _spec(self, rank: int) -> PartitionSpec:
        """Returns the spec of (B..., T, N, H), (B..., N, T) or (B..., T)."""
        heads = self.heads or None
        batch = [axes or None for axes in self.batch]
        return PartitionSpec(*batch, *([], [], [heads], [None, heads])[rank - len(batch)])


def shards_of(
    query: Array, key: Array, value: Array, axes: PartitionSpec | None
) -> tuple[Shards | None, str]:
    """Finds how the operands of attention are sharded.

    Explicit axes of a mesh are those of the arrays' types. Automatic ones are named by `axes`, or
    by Flax's logical axis rules for "activation_batch" or "batch" and "activation_heads" or
    "heads".

    Args:
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H).
      axes: see `attention_axes` of `policy.use_policy`, or None.

    Returns:
      The shards, or None where each device holds whole arrays: there is one, or every axis is
      manual already. And what keeps a kernel from running, or "".

    Raises:
      ValueError: `axes` names an axis that the mesh does not have.
    """
    arrays = query, key, value
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None:
        if jax.device_count() == 1:
            return None, ""
        return None, "several devices without a mesh: call it under jax.set_mesh"
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = tuple(n for n in kinds if kinds[n] != AxisType.Manual and mesh.shape[n] > 1)
    if not names:
        return None, ""
    explicit = {n for n in names if kinds[n] == AxisType.Explicit}
    specs = [_entries(x, explicit) for x in arrays]
    if any(spec[-3] or spec[-1] for spec in specs):
        return None, "arrays that are sharded over positions or over the width of heads"
    (*batch, _, heads, _), *others = specs
    if any(other[:-3] != batch or other[-2] not in (heads, ()) for other in others):
        return None, "queries, keys and values that are sharded differently"
    automatic = [n for n in names if n not in explicit]
    named_batch, named_heads = _named(axes, mesh.axis_names)
    if automatic and not (named_batch or named_heads):
        listed = ", ".join(map(repr, automatic))
        return None, f"automatic axes {listed} of the mesh, which attention_axes= does not name"
    if batch:
        batch[0] += tuple(n for n in named_batch if n in automatic)
    heads += tuple(n for n in named_heads if n in automatic)
    counts = [math.prod(mesh.shape[n] for n in split) for split in (*batch, heads)]
    for size, count in zip(query.shape, counts[:-1], strict=False):
        if size % count:
            return None, f"a batch of {size} over {count} devices"
    query_heads, key_heads = query.shape[-2], key.shape[-2]
    stored = math.lcm(key_heads, counts[-1])
    if query_heads % stored:
        return None, f"{query_heads} heads and {key_heads} key heads over {counts[-1]} devices"
    whose = mesh if meshes[0].empty else None
    return Shards(whose, names, tuple(batch), heads, stored // key_heads), ""


def _entries(x: Array, explicit: Collection[str]) -> list[Names]:
    """Returns the explicit mesh axes that split each axis of an array."""
    spec = [*jax.typeof(x).sharding.spec] if explicit else []
    entries = [_names(entry) for entry in spec] + [()] * (x.ndim - len(spec))
    return [tuple(n for n in entry if n in explicit) for entry in entries]


def _named(axes: PartitionSpec | None, known: Sequence[str]) -> tuple[Names, Names]:
    """Returns the mesh axes of batch and heads, as they are named."""
    if axes is not None:
        batch, heads = (_names(axes[at] if at < len(axes) else None) for at in (0, 2))
        if unknown := [n for n in (*batch, *heads) if n not in known]:
            raise ValueError(
                f"attention_axes={axes} names {', '.join(map(repr, unknown))}, but the axes of the "
                f"mesh are {', '.join(map(repr, known))}."
            )
        return batch, heads
    rules = dict(reversed(get_logical_axis_rules()))  # the first of a name counts
    found = (next((rules[n] for n in logical if n in rules), None) for logical in (_BATCH, _HEADS))
    batch, heads = (tuple(n for n in _names(axes) if n in known) for axes in found)
    return batch, heads


def _names(entry: Any) -> Names:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _resharded(x: Array, spec: PartitionSpec, explicit: Collection[str]) -> Array:
    """Gives an array the sharding by explicit axes that `jax.shard_map` is to be called with."""
    if not explicit:
        return x
    kept = [tuple(n for n in _names(entry) if n in explicit) or None for entry in spec]
    return jax.sharding.reshard(x, PartitionSpec(*kept))

"""The placement of a call's arrays on a target's devices."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from policy.inspect.estimate.targets import Target, axes_text
from policy.programs.tracing.pure_calls import is_array

_GPUS_OF_A_MACHINE = 8


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices that a step runs on.

    Attributes:
      target: the target.
      mesh: of all of its devices.
      is_spread: whether the step runs on all of them; else it runs on the first.
    """

    target: Target
    mesh: jax.sharding.Mesh
    is_spread: bool

    @property
    def devices(self) -> int:
        """The number of devices that run the step."""
        return self.mesh.size if self.is_spread else 1

    @property
    def capacity(self) -> int:
        """Bytes of memory of a device; processors at hand share theirs."""
        memory = self.target.chip.memory
        return int(memory / self.devices if self.target.platform == "cpu" else memory)

    @property
    def notes(self) -> list[str]:
        if self.target.platform == "cuda" and self.devices > _GPUS_OF_A_MACHINE:
            return [
                f"{self.target.name} is estimated as one machine: exchanges have the bandwidth of "
                "the links inside it, and those between machines are slower."
            ]
        if self.is_spread or self.target.devices.size == 1:
            return []
        return [
            f"Nothing is sharded: one of the {self.target.devices.size} devices of "
            f"{self.target.name} runs the whole step. Give shardings= to spread it."
        ]

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope in which the step is traced and lowered: that of its mesh."""
        return jax.set_mesh(self.mesh) if self.is_spread else contextlib.nullcontext()

    def sharding(self, spec: PartitionSpec | None, array: Any, name: str) -> Any:
        """Returns the sharding of an array.

        Raises:
          ValueError: the mesh has no such axis, or the array doesn't divide; the message has its
            name.
        """
        if not self.is_spread:
            return SingleDeviceSharding(self.target.devices[0])
        spec = PartitionSpec() if spec is None else spec
        try:
            found = NamedSharding(self.mesh, spec)
            found.check_compatible_aval(array.shape)
            found.shard_shape(array.shape)
        except Exception as error:  # of JAX, for an axis that is twice in it one of its own kind
            raise ValueError(
                f"{name} can't be sharded by {spec} over {axes_text(self.mesh.shape)}: {error}"
            ) from None
        return found


def placement_of(
    target: Target, mesh: Mapping[str, int] | None, shardings: Any, arguments: Any
) -> Placement:
    """Returns the placement of a call: on all devices if a mesh or any sharding asks for them."""
    found = mesh_of(target, mesh, arguments)
    is_spread = (
        mesh is not None
        or shardings is not None
        or any(
            own.mesh.size > 1 for own in map(_own, jax.tree.leaves(arguments)) if own is not None
        )
    )
    return Placement(target, found, is_spread and target.devices.size > 1)


def mesh_of(target: Target, given: Mapping[str, int] | None, arguments: Any) -> jax.sharding.Mesh:
    """Returns a mesh of a target's devices.

    Args:
      target: the devices.
      given: sizes of axes; None for those of the first sharded array, or else one axis, "data".
      arguments: the arguments of the call.

    Raises:
      TypeError: `given` is no mapping from names to sizes.
      ValueError: the sizes do not multiply to the number of devices.
    """
    if given is not None:
        is_sizes = isinstance(given, Mapping) and all(
            type(size) is int and size > 0 for size in given.values()
        )
        if not given or not is_sizes:
            raise TypeError(
                "mesh should be a dict of axes and their sizes, such as {'data': 16}, but got "
                f"{given!r}."
            )
        return target.mesh(dict(given))
    found = next((s.mesh for s in map(_own, jax.tree.leaves(arguments)) if s is not None), None)
    if found is None or (found.size == 1 and target.devices.size > 1):
        return target.mesh()
    if found.size != target.devices.size:
        raise ValueError(
            f"The arguments are sharded over {axes_text(found.shape)}, {found.size} devices, but "
            f"{target.name} has {target.devices.size}: give a mesh of that size."
        )
    return jax.sharding.Mesh(
        target.devices.reshape(tuple(found.shape.values())),
        found.axis_names,
        axis_types=found.axis_types,
    )


def _own(array: Any) -> NamedSharding | None:
    """Returns an array's own sharding, if it is one over a mesh."""
    sharding = getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def on_targets_mesh(placement: Placement, **arguments: Any) -> dict[str, Any]:
    """Returns the `args` and the `kwargs` of a call, with shapes on the target's mesh for arrays of
    Explicit axes.

    The mesh of such an array is part of its type: a step can't be traced with arrays of one mesh on
    another.

    Raises:
      ValueError: the target's mesh lacks an axis, or an array doesn't divide.
    """

    def moved(path: Any, leaf: Any) -> Any:
        own = _own(leaf)
        if own is None or AxisType.Explicit not in own.mesh.axis_types:
            return leaf
        name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
        sharding = placement.sharding(own.spec, leaf, name) if placement.is_spread else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(moved, arguments)


def placed_arrays(
    placement: Placement,
    shardings: Any,
    args: tuple[Any, ...],
    arrays: Sequence[Any],
    names: Sequence[str],
    origins: Sequence[int | None],
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of a call's arrays with their shardings: the given ones, or their own.

    Keys stay keys.

    Args:
      placement: the devices.
      shardings: an entry for each of `args`; see `policy.estimate`.
      args: the positional arguments.
      arrays: all arrays of the call.
      names: their paths.
      origins: the positional argument that each is of.

    Raises:
      TypeError: `shardings` has another form.
      ValueError: it has more or fewer entries, an entry is a tree of another form, the mesh has no
        such axis, or an array doesn't divide.
    """
    entries = _entries(shardings, args)
    trees = {i: _spread(entry, args[i], i) for i, entry in enumerate(entries)}
    placed = []
    for array, name, origin in zip(arrays, names, origins, strict=True):
        spec = _spec(None if origin is None else next(trees[origin]), array, name)
        sharding = placement.sharding(spec, array, name)
        placed.append(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))
    return placed


def _entries(shardings: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    shardings = {} if shardings is None else shardings
    count = f"the function is called with {len(args)} positional arguments"
    if isinstance(shardings, Mapping):
        beyond = set(shardings) - set(range(len(args)))
        if beyond:
            raise ValueError(
                f"shardings has an entry for the argument {beyond.pop()!r}, but {count}."
            )
        return tuple(map(shardings.get, range(len(args))))
    if isinstance(shardings, PartitionSpec) or not isinstance(shardings, (tuple, list)):
        raise TypeError(
            "shardings should be a tuple with an entry for each positional argument, such as "
            "(None, PartitionSpec('data')), or a dict of entries by position, but got "
            f"{shardings!r}."
        )
    if len(shardings) != len(args):
        raise ValueError(
            f"shardings has {len(shardings)} entries, but {count}: give one for each, None for "
            "those that every device holds."
        )
    return tuple(shardings)


def _is_entry(entry: Any) -> bool:
    return entry is None or isinstance(entry, (PartitionSpec, NamedSharding)) or callable(entry)


def _spread(entry: Any, arg: Any, position: int) -> Iterator[Any]:
    """Yields the entry of each array of an argument, whose tree may have several."""
    if _is_entry(entry):
        yield from itertools.repeat(entry)
    entries: list[Any] = []

    def take(one: Any, part: Any) -> None:
        entries.extend([one] * sum(map(is_array, jax.tree.leaves(part))))

    try:
        jax.tree.map(take, entry, arg, is_leaf=_is_entry)
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"shardings[{position}] is not a prefix of the argument's tree: {reason}"
        ) from None
    yield from entries


def _spec(entry: Any, array: Any, name: str) -> PartitionSpec | None:
    spec = entry(name, array) if callable(entry) else entry
    if entry is None:
        spec = _own(array)
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise TypeError(
            "An entry of shardings should be a PartitionSpec, None, a tree of these, or a function "
            f"that returns one, but {name} is given {spec!r}."
        )
    return spec

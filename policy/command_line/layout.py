"""The mesh, the shardings and the donated arguments of an estimate, written as text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from policy.command_line.target import CommandError


def mesh_sizes(text: str | None) -> dict[str, int] | None:
    """Returns the axes of a mesh from ``data=16,model=16``.

    >>> mesh_sizes("data=16,model=16")
    {'data': 16, 'model': 16}

    Raises:
      CommandError: the text has another form, or an axis twice.
    """
    if text is None:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not re.fullmatch(r"[1-9]\d*", size, re.ASCII):
            raise CommandError(
                f"--mesh {text!r} should be axes and their sizes, as in data=16,model=16."
            )
        if name in found:
            raise CommandError(f"--mesh {text!r} has the axis {name!r} twice.")
        found[name] = int(size)
    return found


def shardings_of(
    texts: list[str], mesh: Mapping[str, int] | None
) -> dict[int, PartitionSpec] | None:
    """Returns the specs of arguments, by position, from texts such as ``2=data+fsdp,None``.

    >>> tuple(shardings_of(["2=data+fsdp,None"], {"data": 4, "fsdp": 4})[2])
    (('data', 'fsdp'), None)

    Args:
      texts: one for each argument.
      mesh: sizes by axis; None stands for one axis, "data".

    Raises:
      CommandError: a text has another form, names an axis that the mesh lacks or names it twice, or
        two texts are about one argument.
    """
    found: dict[int, PartitionSpec] = {}
    for text in texts:
        position, equals, axes = text.partition("=")
        if not equals or not re.fullmatch(r"\s*\d+\s*", position, re.ASCII):
            raise CommandError(
                f"--shard {text!r} should be an argument's position and axes of the mesh, as in "
                "0=data or 2=data,None."
            )
        if int(position) in found:
            raise CommandError(f"--shard is given twice for the argument {int(position)}.")
        found[int(position)] = _spec(axes, text, tuple(mesh or ("data",)))
    return found or None


def _spec(text: str, whole: str, known: tuple[str, ...]) -> PartitionSpec:
    entries = [[axis.strip() for axis in part.split("+")] for part in text.split(",")]
    named = [axis for axes in entries if axes != ["None"] for axis in axes]
    for axis in named:
        if axis not in known:
            raise CommandError(
                f"--shard {whole!r}: the mesh has no axis {axis!r}. Its axes: {', '.join(known)}; "
                "see --mesh."
            )
        if named.count(axis) > 1:
            raise CommandError(f"--shard {whole!r} has the axis {axis!r} twice.")
    return PartitionSpec(
        *(
            None if axes == ["None"] else axes[0] if len(axes) == 1 else tuple(axes)
            for axes in entries
        )
    )


def positions_of(text: str | None) -> tuple[int, ...] | None:
    """Returns positions of arguments from ``0,1``.

    >>> positions_of("0,1")
    (0, 1)

    Raises:
      CommandError: the text has another form.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text, re.ASCII):
        raise CommandError(f"--donate {text!r} should be positions of arguments, as in 0,1.")
    return tuple(int(part) for part in text.split(","))

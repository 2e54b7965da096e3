"""The mesh, the shardings and the donated arguments of an estimate, written as text."""

from __future__ import annotations

import re

from jax.sharding import PartitionSpec

from policy.command_line.target import CommandError


def mesh_sizes(text: str | None) -> dict[str, int] | None:
    """Returns the axes of a mesh from ``data=16,model=16``.

    >>> mesh_sizes("data=16,model=16")
    {'data': 16, 'model': 16}

    Raises:
      CommandError: the text has another form.
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
        found[name] = int(size)
    return found


def shardings_of(texts: list[str]) -> dict[int, PartitionSpec] | None:
    """Returns the specs of arguments, by position, from texts such as ``2=data+fsdp,None``.

    >>> tuple(shardings_of(["2=data+fsdp,None"])[2])
    (('data', 'fsdp'), None)

    Raises:
      CommandError: a text has another form, or two are about one argument.
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
        parts = [tuple(axis.strip() for axis in part.split("+")) for part in axes.split(",")]
        entries = [None if part == ("None",) else part for part in parts]
        found[int(position)] = PartitionSpec(*entries)
    return found or None


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

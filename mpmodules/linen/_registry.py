"""The linen modules that obey policies, and the classes of ours that stand for Flax's."""

from __future__ import annotations

import functools
from typing import Any

from mpmodules.calls.boundary import PLAIN, Crossing

# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}


def is_ours(cls: type | None) -> bool:
    """Returns whether a class is one of ours, rather than one of Flax's that only passes
    ``issubclass(_, Module)``.
    """
    return hasattr(cls, "_is_layer")


def obeys_policies(module: Any) -> bool:
    """Returns whether `module` is one of ours, or was adopted."""
    return is_ours(type(module))


@functools.cache
def layer_class(cls: type) -> Any:
    """Returns our class for a Flax class, or for a user's that derives from it.

    Returns None for other classes.
    """
    return next((LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF), None)


def crossing_of(module: Any, name: str) -> Crossing:
    """Returns the casts of a call of a module's method of that name.

    Only ``__call__`` takes and returns a carry.
    """
    return _crossing_of(type(module)) if name == "__call__" else PLAIN


@functools.cache
def _crossing_of(cls: type) -> Crossing:
    ours: list[Any] = [LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF]
    return next((each._crossing for each in ours if each._crossing is not PLAIN), PLAIN)

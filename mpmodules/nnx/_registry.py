"""The nnx modules that obey policies, ours and ported ones, and the classes of ours that stand for
Flax's.
"""

from __future__ import annotations

import functools
from typing import Any

from mpmodules._boundary import PLAIN, Crossing

# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}

# The attribute that marks a ported module of a class that is not ours
# (`mpmodules.nnx._ported_classes.Port`).
PORT = "_policy_port"


def is_ours(cls: type) -> bool:
    """Returns whether a class is one of ours, rather than one of Flax's that only passes
    ``issubclass(_, Module)``.
    """
    return hasattr(cls, "_policy_source")


def obeys_policies(module: Any) -> bool:
    """Returns whether `module` carries a policy, or could: it is one of ours, or `apply_policy`
    ported it.
    """
    return is_ours(type(module)) or PORT in getattr(module, "__dict__", ())


@functools.cache
def layer_class(cls: type) -> Any:
    """Returns our class for a Flax class, or for a user's that derives from it.

    Returns None for other classes.
    """
    return next((LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF), None)


def as_ours(module: Any) -> Any:
    """Returns a view of our class on a ported module of Flax's: both have the same attributes.

    Others are returned.
    """
    port = None if is_ours(type(module)) else vars(module).get(PORT)
    return module if port is None else port.view(module)


def crossing_of(module: Any, name: str) -> Crossing:
    """Returns the casts of a call of a module's method of that name.

    Only ``__call__`` takes and returns a carry.
    """
    return _crossing_of(type(module)) if name == "__call__" else PLAIN


@functools.cache
def _crossing_of(cls: type) -> Crossing:
    ours: list[Any] = [LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF]
    return next((each._crossing for each in ours if each._crossing is not PLAIN), PLAIN)

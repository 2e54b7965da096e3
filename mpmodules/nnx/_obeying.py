"""Modules of nnx that obey policies: those of our classes, and those that `apply_policy` ported."""

from __future__ import annotations

from typing import Any

# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}

# The attribute that marks a ported module of a class that is not ours (`mpmodules.nnx._entries.Port`).
PORT = "_policy_port"


def is_ours(cls: type) -> bool:
    """Returns whether a class is one of ours, rather than one of Flax's that only passes ``issubclass(_, Module)``."""
    return hasattr(cls, "_policy_source")


def obeys_policies(module: Any) -> bool:
    """Returns whether `module` carries a policy, or could: it is one of ours, or `apply_policy` ported it."""
    return is_ours(type(module)) or PORT in getattr(module, "__dict__", ())


def as_ours(module: Any) -> Any:
    """Returns a view of our class on a ported module of Flax's: both have the same attributes. Others are returned."""
    port = None if is_ours(type(module)) else vars(module).get(PORT)
    return module if port is None else port.view(module)


def viewed(module: Any, **attributes: Any) -> Any:
    """Makes a shallow copy with other static attributes. Variables are shared: the module sees the view's updates."""
    view = object.__new__(type(module))
    view.__dict__.update(module.__dict__)
    view.__dict__.update(attributes)
    return view

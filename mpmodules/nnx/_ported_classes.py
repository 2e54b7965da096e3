"""The classes of ported modules: ours for Flax's layers, and subclasses of all others.

A subclass has the name of its base, derives from it and from a class of ours, and its public
methods are boundaries. Looked up on the class, they are the functions of the base: code that asks
whether a class overrides a method gets the same answer.
"""

from __future__ import annotations

import copyreg
from typing import Any

from flax import nnx as flax_nnx

from mpmodules.nnx._boundary import install_boundaries
from mpmodules.nnx._module import Module
from mpmodules.nnx._registry import LAYER_OF, is_ours, layer_class
from mpmodules.tracing.nnx_rebuilding import one_per_class, stand_in


@one_per_class
def ported_class(cls: Any) -> Any:
    """Returns the class of ported modules of a class: itself where it is one of ours."""
    if is_ours(cls):
        return cls
    if cls in LAYER_OF:
        return LAYER_OF[cls]
    ported = stand_in(
        cls, {"_ported_from": cls, "__reduce__": _reduced}, layer_class(cls) or Module
    )
    install_boundaries(ported, is_port=True)
    copyreg.pickle(type(ported), _reduced_class)  # type: ignore[arg-type]
    return ported


def _reduced(module: Any) -> Any:
    return _empty, (type(module)._ported_from,), module.__getstate__()


def _empty(cls: type) -> Any:
    return object.__new__(ported_class(cls))


def _reduced_class(cls: Any) -> Any:
    """Reduces a class for pickle: one that was made for a port, or else one that is found by name.

    Graph definitions hold classes.
    """
    made_from = vars(cls).get("_ported_from")
    return cls.__qualname__ if made_from is None else (ported_class, (made_from,))


def is_container(module: Any) -> bool:
    """Returns whether a module can't carry a policy, or has no methods that would obey one.

    A Dict reads every attribute as an item of it, and a linen module in a bridge as a variable.
    """
    held = isinstance(module, flax_nnx.Dict | flax_nnx.bridge.ToNNX)
    return held or type(module) is flax_nnx.List

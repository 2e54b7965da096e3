"""Classes of modules that obey policies, and those of ours that stand for Flax's, in both wings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen, nnx

from mpmodules.calls.boundary import PLAIN, Crossing
from mpmodules.calls.defined_in import is_flax, is_upstream

# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}


def register_layer(cls: Any) -> type | None:
    """Notes that one of our classes stands for Flax's class of its name, and returns that.

    Returns None of a class that stands for none.
    """
    for base in cls.__bases__:
        if base.__name__ == cls.__name__ and is_flax(base):
            cls._upstream_class, LAYER_OF[base] = base, cls
            return base
    return None


@functools.cache
def is_ours(cls: type | None) -> bool:
    """Returns whether a class is one of ours, rather than one of Flax's that only passes
    ``issubclass(_, Module)``.
    """
    return hasattr(cls, "_is_layer")


@functools.cache
def remedy_for(cls: type, wing: str) -> str:
    """Returns the sentence on a class of modules that can obey no policy; "" of one of ours."""
    if is_ours(cls):
        return ""
    name = f"flax.{wing}.{cls.__name__}" if is_flax(cls) else f"{cls.__name__} of flax.{wing}"
    return (
        f"{name} obeys no policy: import {wing} from mpmodules in its place, or call "
        f"mpmodules.{wing}.apply_policy on the model."
    )


@functools.cache
def layer_class(cls: type) -> Any:
    """Returns our class for a Flax class, or for a user's that derives from it.

    Returns None for other classes.
    """
    return next((LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF), None)


@functools.cache
def crossing_of(cls: type, method: str) -> Crossing:
    """Returns the casts of a call of a method of a class.

    Only ``__call__`` takes and returns a carry.
    """
    if method != "__call__":
        return PLAIN
    ours: list[Any] = [LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF]
    return next((each._crossing for each in ours if each._crossing is not PLAIN), PLAIN)


# Modules of Flax's that call what they are given.
CALLERS = (
    *(linen.Sequential, linen.RNN, linen.Bidirectional),
    *(nnx.Sequential, nnx.RNN, nnx.Bidirectional),
)


@functools.cache
def is_library(method: Any) -> bool:
    """Returns whether a method is Flax's or ours, also where it is transformed."""
    return is_upstream(inspect.unwrap(method))


def calls_users(module: Any) -> bool:
    """Returns whether a module calls code of a user's: one of `CALLERS` with anything but cells of
    Flax's or ours.
    """
    if isinstance(module, linen.Sequential | nnx.Sequential):
        return True
    return not all(map(is_library, _cells_of(module)))


def _cells_of(module: Any) -> Iterator[Callable[..., Any]]:
    """Yields the methods of the cells that a loop calls."""
    if isinstance(module, linen.Bidirectional | nnx.Bidirectional):
        yield from _cells_of(module.forward_rnn)
        yield from _cells_of(module.backward_rnn)
    elif isinstance(module, linen.RNN | nnx.RNN):
        yield type(module.cell).__call__

"""Classes of modules: whose they are, which obey policies, and which of ours stand for Flax's."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen, nnx


def module_of(definition: Any) -> str:
    """Returns the name of the Python module that a class or function was defined in, or "" where it
    does not say.
    """
    return getattr(definition, "__module__", None) or ""


def package_of(definition: Any) -> str:
    """Returns the top-level package that a class or function was defined in, or "" where it does
    not say.
    """
    return module_of(definition).partition(".")[0]


def is_flax(definition: Any) -> bool:
    """Returns whether a class or function is Flax's own."""
    return package_of(definition) == "flax"


def is_upstream(definition: Any) -> bool:
    """Returns whether a class or function is Flax's own, or ours in its place, rather than a
    user's.
    """
    return package_of(definition) in ("flax", "mpmodules")


def is_public(name: str) -> bool:
    """Returns whether a method of that name is public."""
    return name == "__call__" or not name.startswith("_")


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


class InstanceMethod:
    """A method of instances; looked up on the class, it is the function that the base class has.

    Code that asks whether a class overrides a method, as in ``type(self).encode is not
    Base.encode``, compares the functions of classes. A subclass that only puts something around a
    method must not look like an override.

    Args:
      shown: the function of the base class.
      run: the function that a call on an instance runs.
    """

    nowrap = True  # Flax wraps the descriptors of a module's class otherwise

    def __init__(self, shown: Callable[..., Any], run: Callable[..., Any]):
        self._shown, self.run = shown, run

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return self._shown if instance is None else types.MethodType(self.run, instance)

"""Ported classes: the boundary around their methods, put in the classes that define them.

A ported module keeps its class. The public methods of that class and of its bases are wrapped once,
in the class that defines them. A wrapper asks the instance whether it is ported, and otherwise
calls straight through. Thus methods that two classes share stay the same object, and those that
differ stay different.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx as flax_nnx

from mpmodules._defined_in import is_flax, package_of
from mpmodules._nnx_names import classes_lock, defined, holds_items, redefine
from mpmodules.nnx._boundary import NOT_BOUNDARIES, Method, is_boundary_name, is_method, run_method
from mpmodules.nnx._module import Module
from mpmodules.nnx._registry import LAYER_OF, PORT, as_ours, is_ours, layer_class

_ENTRY = "_policy_entry"


@dataclasses.dataclass(frozen=True)
class Port:
    """Static metadata that marks a ported module of a class that is not ours.

    Unpickling it wraps the class's methods.

    Attributes:
      cls: the module's class.
      casts_outputs: whether floating outputs of the class's own methods are cast to the
        compute_dtype of their caller.
    """

    cls: type
    casts_outputs: bool = False

    @property
    def kind(self) -> type:
        """The class of ours whose rules hold for the module: that of its Flax layer, or else
        `Module`.
        """
        return layer_class(self.cls) or Module

    def view(self, module: Any) -> Any:
        """Returns a module of ours that shares all attributes with a ported one.

        Returns other modules as they are.
        """
        if layer_class(self.cls) is None:
            return module
        view = object.__new__(_view_class(self.cls))
        object.__setattr__(view, "__dict__", vars(module))
        return view

    def __reduce__(self) -> Any:
        return port_of, (self.cls, self.casts_outputs)


def port_of(cls: type, casts_outputs: bool = False) -> Port:
    """Wraps the methods of a class, and returns the metadata of a ported instance."""
    wrap_methods(cls)
    return Port(cls, casts_outputs)


@functools.cache
def _view_class(cls: Any) -> Any:
    """Returns our class for Flax's; for a user's subclass of that, one that derives from both."""
    ours = layer_class(cls)
    if cls in LAYER_OF:
        return ours
    meta, own = type(ours), type(cls)
    if not issubclass(meta, own):
        meta = own if issubclass(own, meta) else type(own.__name__, (own, meta), {})
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return meta(cls.__name__, (cls, ours), names, pytree=cls._pytree__is_pytree)


def wrap_methods(cls: type) -> None:
    """Puts an entry around each public method that `cls` and its bases define.

    Those that have one keep it.
    """
    with classes_lock:
        for base in reversed(cls.__mro__):
            for name, method in _methods(base):
                redefine(base, name, _entry(base, name, method))


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the methods of a class that get an entry, ``__call__`` before its aliases."""
    is_standard = package_of(cls) in sys.stdlib_module_names  # as Generic is, and MutableMapping
    if is_ours(cls) or (is_standard and not issubclass(cls, flax_nnx.Module)):
        return
    is_upstream, ours = is_flax(cls), LAYER_OF.get(cls)
    for name in sorted(vars(cls), key=lambda name: name != "__call__"):
        method = defined(cls, name)
        if not is_method(method) or _entry_of(method) is method:
            continue
        if name in NOT_BOUNDARIES and ours is not None:
            if inspect.getattr_static(ours, name) is not method:
                yield name, method
        elif is_boundary_name(name) and (ours is not None or name == "__call__" or not is_upstream):
            yield name, method


class _TransformedEntry:
    """The entry around a transformed method, such as nnx.jit makes.

    It has the attributes of that method.
    """

    def __init__(self, method: Any, call: Callable[..., Any]):
        self.__wrapped__, self.__doc__ = method, method.__doc__
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self._call, instance)

    def __getattr__(self, name: str) -> Any:
        if "__wrapped__" not in vars(self):  # not yet initialised, as in a copy
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def _entry(owner: type, name: str, method: Any) -> Any:
    """Returns the entry of a method.

    One function under two names, or in two classes, has one entry.
    """
    made = _entry_of(method)
    if made is not None and made.__wrapped__ is method:
        return made
    straight = method if inspect.isfunction(method) else _calling(method)
    body, is_upstream = _body(owner, name, straight), is_flax(owner)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if PORT not in getattr(self, "__dict__", ()) or is_ours(type(self)):
            return straight(self, *args, **kwargs)
        if name in NOT_BOUNDARIES:
            return body(as_ours(self), *args, **kwargs)
        return run_method(self, Method(body, name, is_upstream, method), args, kwargs)

    entry = call if inspect.isfunction(method) else _TransformedEntry(method, call)
    for noted in (entry, method):
        if hasattr(noted, "__dict__"):
            vars(noted)[_ENTRY] = entry
    return entry


def _entry_of(method: Any) -> Any:
    """Returns the entry that was made of a method, or the method itself where it is one.

    Returns None where there is none.
    """
    return getattr(method, "__dict__", {}).get(_ENTRY)


def _calling(method: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: method.__get__(self, type(self))(*args, **kwargs)


def _body(owner: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that a ported module runs: ours in place of a Flax layer's, without a
    boundary.
    """
    ours = LAYER_OF.get(owner)
    if ours is None:
        return method
    found = inspect.getattr_static(ours, name)
    return found.__wrapped__ if vars(found).get("_policy_boundary") is found else found


def is_container(module: Any) -> bool:
    """Returns whether a module can't carry a policy, or has no methods that would obey one."""
    return holds_items(module) or type(module) is flax_nnx.List

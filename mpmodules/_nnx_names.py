"""Paths of nnx modules on JAX's name stack, where Flax puts none, noted for `policy` where a call
is traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, cast

import jax
from flax import nnx as flax_nnx

from policy._jaxpr.module_names import note, note_repeated, note_root
from policy.policy import Policy
from policy.requested_dtypes import note_given, note_obeyed


class _Naming(threading.local):
    """The paths of the modules that are being named in this thread, by identity, and the call under
    way.
    """

    def __init__(self) -> None:
        self.paths: dict[int, tuple[str, ...]] = {}
        self.here: tuple[str, ...] = ()


_naming = _Naming()
_PATH = "_policy_path"
_patched: dict[
    type, list[Any]
] = {}  # the class's own `__call__`, or None, and how many namings want it wrapped
classes_lock = threading.RLock()  # held by whoever replaces methods of classes


def holds_items(module: Any) -> bool:
    """Returns whether a module reads every attribute as an item of it, or as a variable, so that
    none can be added.
    """
    return isinstance(module, flax_nnx.Dict | flax_nnx.bridge.ToNNX)


@contextlib.contextmanager
def named_modules(node: Any) -> Iterator[None]:
    """Puts the paths of `node`'s modules on JAX's name stack, below the root's class, while this
    thread calls them.

    Their classes' `__call__` are wrapped meanwhile; calls of other instances, or in other threads,
    are not named. nnx's transformations call copies of modules: each carries its path in a static
    attribute, so `node` must be a copy.
    """
    modules = [(path, module) for root in _roots(node) for path, module in _below(root)]
    classes = {type(module) for _, module in modules if callable(module)}
    outer, outer_here = _naming.paths, _naming.here
    _naming.paths = outer | {id(module): path for path, module in modules}
    for path, module in modules:
        if callable(module) and not holds_items(
            module
        ):  # others are not called, or not found in copies
            object.__setattr__(module, _PATH, "/".join(path))
    for cls in classes:
        _wrap(cls)
    try:
        yield
    finally:
        _naming.paths, _naming.here = outer, outer_here
        for cls in classes:
            _unwrap(cls)


def note_island(module: Any, policy: Policy | None) -> None:
    """Notes for reports that a module obeys the policy of an island in a call."""
    path = _path_of(module)
    if path:
        note_obeyed(path[0], "/".join(path[1:]), policy)


def _path_of(module: Any) -> tuple[str, ...] | None:
    """Returns the path of a module that is being named, or of a copy of one; else None."""
    path = _naming.paths.get(id(module))
    if path is not None or not _naming.paths:
        return path
    written = vars(module).get(_PATH)
    return None if written is None else tuple(written.split("/"))


def _roots(node: Any) -> list[Any]:
    is_module = lambda leaf: isinstance(leaf, flax_nnx.Module)  # noqa: E731
    leaves = jax.tree.leaves(node, is_leaf=is_module)
    return list({id(leaf): leaf for leaf in leaves if is_module(leaf)}.values())


def _below(root: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns a root's modules, and the path of each below the root's class name."""
    name = type(root).__name__
    below = [((name, *map(str, path)), module) for path, module in flax_nnx.iter_modules(root)]
    for key in {key for path, _ in below for key in path}:
        note(key)
    note_root(name)
    for path, module in below:
        note_obeyed(name, "/".join(path[1:]), getattr(module, "dtype_policy", None))
        if type(module).__module__.startswith(("flax.nnx.", "mpmodules.nnx.")):
            note_given(name, "/".join(path[1:]), getattr(module, "dtype", None))
        if path[-2:-1] == path[-1:]:
            note_repeated(path[-1])
    return below


def _wrap(cls: type) -> None:
    with classes_lock:
        if cls in _patched:
            _patched[cls][1] += 1
            return
        patch = _patched[cls] = [cls.__dict__.get("__call__"), 1]

        @functools.wraps(cast(Any, cls).__call__)
        def named(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Looked up now, since a port may have replaced it, and in `cls`, since a subclass may
            # have called this one.
            own = _inherited(cls) if patch[0] is None else patch[0]
            call = own.__get__(self, type(self))
            path = _path_of(self)
            if path is None or path == _naming.here:
                return call(*args, **kwargs)
            here = _naming.here
            relative = path[len(here) :] if path[: len(here)] == here else path
            _naming.here = path
            try:
                with jax.named_scope("/".join(relative)):
                    return call(*args, **kwargs)
            finally:
                _naming.here = here

        cast(Any, cls).__call__ = named


def _inherited(cls: type) -> Any:
    return next(vars(base)["__call__"] for base in cls.__mro__[1:] if "__call__" in vars(base))


def _unwrap(cls: type) -> None:
    with classes_lock:
        own, count = _patched[cls]
        if count > 1:
            _patched[cls][1] = count - 1
            return
        del _patched[cls]
        if own is None:
            del cast(Any, cls).__call__
        else:
            cast(Any, cls).__call__ = own


def defined(cls: type, name: str) -> Any:
    """Returns a method as a class defines it, without the naming that may be around it.

    Returns None where it defines none.
    """
    return _patched[cls][0] if name == "__call__" and cls in _patched else vars(cls).get(name)


def redefine(cls: type, name: str, method: Any) -> None:
    """Replaces a method that a class defines, inside of the naming that may be around it.

    Call under `classes_lock`.
    """
    if name == "__call__" and cls in _patched:
        _patched[cls][0] = method
    else:
        type.__setattr__(cls, name, method)

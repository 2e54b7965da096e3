"""Calls of nnx modules as calls of pure functions: state goes in and out, and modules are named while traced."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from flax import nnx as flax_nnx

from policy._jaxpr.module_names import note, note_repeated, note_root
from policy._jaxpr.trace import LOWERINGS, Lowered
from policy.policy import Policy
from policy.requested_dtypes import note_given, note_obeyed
from policy.traced.gradients import NO_PARAMETERS

_NODES = (flax_nnx.Module, flax_nnx.Rngs, flax_nnx.RngStream, flax_nnx.Variable, flax_nnx.Optimizer)


def lowered(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered | None:
    """Lowers a call of a module or method, or with modules among its arguments, to a call of a pure function.

    Every `nnx.Param` of the modules is a parameter, and the call's updates of their state are put in place. A
    `nnx.State` is a tree of arrays, as for `jax.jit`: what is merged from it and changes does not change it.
    """
    module, method = _holder(fn)
    is_node = lambda leaf: isinstance(leaf, _NODES)  # noqa: E731
    is_leaf = lambda leaf: isinstance(leaf, (*_NODES, flax_nnx.State))  # noqa: E731
    leaves, treedef = jax.tree.flatten((module, args, kwargs), is_leaf=is_leaf)
    places = tuple(map(is_node, leaves))
    if not any(places):
        return None
    nodes = tuple(leaf for leaf, is_one in zip(leaves, places, strict=True) if is_one)
    others = [leaf for leaf, is_one in zip(leaves, places, strict=True) if not is_one]  # shapes will do for arrays
    graph, params, rest = flax_nnx.split(nodes, flax_nnx.Param, ...)

    def finish(returned: tuple[Any, Any]) -> Any:
        out, state = returned
        flax_nnx.update(nodes, state)
        return out

    pure = functools.partial(_pure, method, graph, treedef, places)
    key = (_hashable(graph), treedef, places)
    return Lowered(key, pure, (params, rest, others), finish=finish, result=lambda returned: returned[0])


def _hashable(graph: Any) -> Any:
    """Returns a key for a graphdef: itself, or where lists, dicts or sets are static in it, the contents of those.

    A graphdef that has no key is returned as it is: one of arrays or modules that are static, which may change.
    """
    try:
        hash(graph)
        return graph
    except TypeError:
        pass
    try:
        key = (tuple(graph.nodes), tuple((name, _frozen(attribute)) for name, attribute in graph.attributes))
        hash(key)
        return key
    except TypeError:
        return graph


def _frozen(value: Any) -> Any:
    """Returns static data as a hashable value.

    Raises:
      TypeError: it holds modules or variables, which are equal to themselves whatever they hold.
    """
    if isinstance(value, _NODES):
        raise TypeError(f"{type(value).__name__} is no static data.")
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, (dict, set, frozenset)):
        pairs = value.items() if isinstance(value, dict) else ((item, None) for item in value)
        return type(value), frozenset((_frozen(key), _frozen(item)) for key, item in pairs)
    if isinstance(value, flax_nnx.graph.Static):
        return type(value), _frozen(value.value)
    # 1, 1.0 and True are equal, and -0.0 is 0.0.
    return type(value), value.hex() if isinstance(value, float) else value


def _holder(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the module that a function is, or is a method of, or None; and the function of module and arguments."""
    if isinstance(fn, flax_nnx.Module):
        return fn, lambda module, *args, **kwargs: module(*args, **kwargs)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, flax_nnx.Module):
        return owner, lambda module, *args, **kwargs: getattr(module, fn.__name__)(*args, **kwargs)
    return None, lambda _, *args, **kwargs: fn(*args, **kwargs)


def _pure(
    method: Callable[..., Any], graph: Any, treedef: Any, places: tuple[bool, ...], params: Any, rest: Any, others: Any
) -> Any:
    nodes = flax_nnx.merge(graph, params, rest, copy=True)
    merged, given = iter(nodes), iter(others)
    leaves = [next(merged) if is_node else next(given) for is_node in places]
    module, args, kwargs = jax.tree.unflatten(treedef, leaves)
    with named_modules(nodes):
        out = method(module, *args, **kwargs)
    return out, flax_nnx.state(nodes, flax_nnx.Variable)


LOWERINGS.append(lowered)
NO_PARAMETERS.append(lambda node: isinstance(node, flax_nnx.Variable) and not isinstance(node, flax_nnx.Param))


# ---------------------------------------------------------------------------------------------------------------------
# Names: nnx puts none on JAX's name stack
# ---------------------------------------------------------------------------------------------------------------------


class _Naming(threading.local):
    """The paths of the modules that are being named in this thread, by identity, and the call under way."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[str, ...]] = {}
        self.here: tuple[str, ...] = ()


_naming = _Naming()
_PATH = "_policy_path"
_patched: dict[type, list[Any]] = {}  # the class's own `__call__`, or None, and how many namings want it wrapped
classes_lock = threading.RLock()  # held by whoever replaces methods of classes


def holds_items(module: Any) -> bool:
    """Returns whether a module reads every attribute as an item of it, or as a variable, so that none can be added."""
    return isinstance(module, flax_nnx.Dict | flax_nnx.bridge.ToNNX)


@contextlib.contextmanager
def named_modules(node: Any) -> Iterator[None]:
    """Puts the paths of `node`'s modules on JAX's name stack, below the root's class, while this thread calls them.

    Their classes' `__call__` are wrapped meanwhile; calls of other instances, or in other threads, are not named. nnx's
    transformations call copies of modules: each carries its path in a static attribute, so `node` must be a copy.
    """
    modules = [(path, module) for root in _roots(node) for path, module in _below(root)]
    classes = {type(module) for _, module in modules if callable(module)}
    outer, outer_here = _naming.paths, _naming.here
    _naming.paths = outer | {id(module): path for path, module in modules}
    for path, module in modules:
        if callable(module) and not holds_items(module):  # others are not called, or not found in copies
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
            # Looked up now, since a port may have replaced it, and in `cls`, since a subclass may have called this one.
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
    """Returns a method as a class defines it, without the naming that may be around it; None where it defines none."""
    return _patched[cls][0] if name == "__call__" and cls in _patched else vars(cls).get(name)


def redefine(cls: type, name: str, method: Any) -> None:
    """Replaces a method that a class defines, inside of the naming that may be around it. Call under `classes_lock`."""
    if name == "__call__" and cls in _patched:
        _patched[cls][0] = method
    else:
        type.__setattr__(cls, name, method)

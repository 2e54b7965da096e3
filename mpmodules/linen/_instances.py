"""Instances of modules: their attributes and methods, those that stand in for them, and keys of
those that run alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
import numpy as np
from flax.core import Scope


class _Bare(flax_nn.Module):
    """A module without fields or code of its own."""


_FLAX_STATE = frozenset(vars(_Bare(parent=None)))


def fields_of(model: flax_nn.Module) -> dict[str, Any]:
    return {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.init and f.name != "parent"
    }


def state_of(model: flax_nn.Module) -> dict[str, Any]:
    """Returns the attributes of the instance beside its fields, such as a config."""
    fields = {f.name for f in dataclasses.fields(model) if f.init}
    return {name: value for name, value in vars(model).items() if name not in fields | _FLAX_STATE}


# --------------------------------------------------------------------------------------------------
# Stand-ins
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stand_in(module: Any, cls: type, fields: Mapping[str, Any]) -> Iterator[Any]:
    """Yields an instance of `cls` with other `fields` that shares a bound module's scope and state.

    What setup and calls leave behind on it is the module's afterwards, whose fields stay as they
    are. With no fields to change, that is the module itself.
    """
    if not fields:
        yield module
        return
    other: Any = object.__new__(cls)
    namespace = vars(other)
    namespace.update(vars(module), **fields)
    before = dict(namespace)
    try:
        yield other
    finally:
        declared = {field.name for field in dataclasses.fields(other) if field.init}
        for name, value in namespace.items():
            if name not in declared and (name not in before or value is not before[name]):
                object.__setattr__(module, name, value)
        for child in module._state.children.values():
            if isinstance(child, flax_nn.Module) and child.parent is other:
                object.__setattr__(child, "parent", module)


# --------------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------------


def key_of(value: Any) -> Hashable:
    """Returns a key of a bound module, or of a static value: equal where the code of both runs
    alike, on other variables.

    Raises:
      TypeError: it holds arrays, variables, or values that are not hashable.
    """
    return _key(value, {})


_HELD = (jax.Array, np.ndarray, flax_nn.Variable, Scope)


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    if isinstance(value, _HELD) or inspect.ismethod(value):
        raise TypeError(f"{type(value).__name__} is not static.")
    if isinstance(value, str | type | types.ModuleType | None):
        return value
    if isinstance(value, float):  # 1, 1.0 and True are equal, and -0.0 is 0.0
        return float, value.hex()
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(item, seen) for item in value)
    if isinstance(value, Mapping):
        return type(value), tuple((key, _key(item, seen)) for key, item in value.items())
    if isinstance(value, set):
        return set, frozenset(value)
    if isinstance(value, functools.partial):
        return functools.partial, _key((value.func, value.args, value.keywords), seen)
    is_module = isinstance(value, flax_nn.Module)
    by_value = type(value).__hash__ not in (None, object.__hash__)
    if not is_module and (by_value or callable(value) or not hasattr(value, "__dict__")):
        return type(value), value
    if id(value) in seen:
        return type(value), seen[id(value)]
    seen[id(value)] = len(seen)
    if is_module:
        return _of_module(value, seen)
    return type(value), _key(vars(value), seen)  # an object whose attributes may change


def _of_module(module: Any, seen: dict[int, int]) -> Hashable:
    scope, state = module.scope, module._state
    place = None if scope is None else (scope.path, scope.name)
    flaxs = _FLAX_STATE | {"scope"}
    parts = [
        {name: value for name, value in vars(module).items() if name not in flaxs},
        (module.name, state.in_compact_method, state.in_setup, int(state.setup_called)),
        state.autoname_cursor,
    ]
    if scope is not None:
        parts += [scope.mutable, scope.flags, scope.rng_counters]
    return type(module), place, _key(parts, seen)

"""Copies of nnx models whose modules are of other classes, and the subclasses that they are of."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx as flax_nnx


class Rebuilding:
    """Copies objects of nnx, and trees that hold them.

    An object that is shared in the original is shared in the copy, and a cycle stays one. Arrays
    are not copied.

    Args:
      class_of: the class of the copy of a module or container.
      keeps_variables: whether the copy holds the same variables, rather than copies of them.
    """

    def __init__(self, class_of: Callable[[Any], type], *, keeps_variables: bool = False):
        self._class_of, self._keeps_variables = class_of, keeps_variables
        self._copies: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Returns the copy of an object, always the same one, or of a tree."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, flax_nnx.Pytree):
            return self._copied_node(value)
        if isinstance(value, flax_nnx.Variable):
            if self._keeps_variables:
                return value
            return self._copies.setdefault(id(value), value.copy())
        if isinstance(value, jax.Ref) and not self._keeps_variables:
            return self._copies.setdefault(id(value), jax.new_ref(value[...]))
        if type(value) is dict:  # a tree map would sort it
            return {key: self(item) for key, item in value.items()}
        if type(value) in (types.MethodType, functools.partial):
            return self._static(value)
        leaves, treedef = jax.tree.flatten(value, is_leaf=lambda part: part is not value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        return treedef.unflatten(map(self, leaves))

    def _copied_node(self, node: Any) -> Any:
        copy = self._copies[id(node)] = object.__new__(self._class_of(node))
        is_data = node._pytree__nodes if node._pytree__is_pytree else {}
        for name, value in vars(node).items():
            copied = self if is_data.get(name, not node._pytree__is_pytree) else self._static
            vars(copy)[name] = copied(value)
        return copy

    def _static(self, value: Any) -> Any:
        """Returns static data, in which methods of an object are those of its copy."""
        if isinstance(value, flax_nnx.Pytree):
            return self(value)
        if isinstance(value, types.MethodType):
            owner = self._static(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if type(value) is functools.partial:
            parts = value.func, *value.args, *value.keywords.values()
            func, *given = map(self._static, parts)
            if not all(map(operator.is_, (func, *given), parts)):
                args, rest = given[: len(value.args)], given[len(value.args) :]
                return functools.partial(
                    func, *args, **dict(zip(value.keywords, rest, strict=True))
                )
        return value


class _StandIn:
    """The first base of a class that passes for another one.

    A user's `__init_subclass__` is not called for it: it may register classes by their names.
    """

    def __init_subclass__(cls: Any) -> None:
        flax_nnx.Pytree.__init_subclass__.__func__(cls, pytree=cls._pytree__is_pytree)  # type: ignore[attr-defined]


def stand_in(cls: Any, namespace: dict[str, Any], *bases: Any) -> Any:
    """Makes a subclass of a class of nnx objects that has its name.

    Args:
      cls: the class.
      namespace: other attributes.
      *bases: classes to derive from after it.
    """
    meta = type(cls)
    for base in bases:
        if not issubclass(meta, type(base)):
            is_above = issubclass(type(base), meta)
            meta = type(base) if is_above else type(meta.__name__, (meta, type(base)), {})
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    first = () if issubclass(cls, _StandIn) else (_StandIn,)
    return meta(cls.__name__, (*first, cls, *bases), names | namespace)


def one_per_class(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorates a function that makes a class for a class: all threads get the same one."""
    made: dict[Any, Any] = {}

    @functools.wraps(make)
    def get(cls: Any) -> Any:
        return made[cls] if cls in made else made.setdefault(cls, make(cls))

    return get

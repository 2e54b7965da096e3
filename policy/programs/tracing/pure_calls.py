"""Calls of functions of trees, as programs of arrays whose results are put back into the tree.

A trace runs on copies of the containers among its arguments, and on the objects themselves.
Afterwards the caller's containers hold the items that the call put there, with arrays in place of
tracers.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from policy.programs.paths import note_keys

_DEPTH = 2  # of objects inside of objects
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, str, bytes, np.generic)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_eager(array: Any) -> bool:
    """Returns whether operations on an array run at once, also where they are differentiated."""
    while isinstance(array, jax.core.Tracer) and hasattr(array, "primal"):
        array = array.primal
    return not isinstance(array, jax.core.Tracer)


@dataclasses.dataclass(frozen=True)
class ArrayTree:
    """A tree without the arrays in it: its structure and its other leaves, which are static.

    Attributes:
      treedef: its structure.
      is_array: for each leaf, whether it is an array or the shape of one.
      static: the other leaves.
    """

    treedef: Any
    is_array: tuple[bool, ...]
    static: tuple[Any, ...]

    @classmethod
    def divided(cls, tree: Any) -> tuple[list[Any], ArrayTree]:
        """Returns the arrays of a tree, and the rest."""
        leaves, treedef = jax.tree.flatten(tree)
        dynamic = tuple(map(is_array, leaves))
        arrays = [leaf for leaf, one in zip(leaves, dynamic, strict=True) if one]
        static = tuple(leaf for leaf, one in zip(leaves, dynamic, strict=True) if not one)
        return arrays, ArrayTree(treedef, dynamic, static)

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with arrays in it."""
        dynamic, fixed = iter(arrays), iter(self.static)
        leaves = [next(dynamic) if i else next(fixed) for i in self.is_array]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class Arguments(ArrayTree):
    """The arguments of a call, ``(args, kwargs)``. Leaves that are no arrays are part of a program.

    Attributes:
      arrays: the leaves that are arrays or shapes of arrays.
    """

    arrays: list[Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        arrays, rest = cls.divided((args, kwargs))
        note_keys(rest.treedef)
        return cls(rest.treedef, rest.is_array, rest.static, arrays)

    @property
    def key(self) -> Any:
        """A key for the programs of one function, besides the shapes of the arrays.

        It may not be hashable.
        """
        # -0.0 is not 0.0
        exact = tuple(leaf.hex() if isinstance(leaf, float) else leaf for leaf in self.static)
        return self.treedef, self.is_array, exact, tuple(map(type, self.static))

    def names(self) -> list[str]:
        """Returns the path of each array: ``args[0]['params']['kernel']``, ``kwargs['mask']``."""
        marks = jax.tree.unflatten(self.treedef, list(self.is_array))
        paths = [path for path, mark in jax.tree_util.tree_leaves_with_path(marks) if mark]
        kinds = ("args", "kwargs")
        return [kinds[getattr(p[0], "idx", 0)] + jax.tree_util.keystr(p[1:]) for p in paths]


@dataclasses.dataclass(frozen=True)
class _Container:
    """A list, dict or object among the arguments.

    Attributes:
      given: the caller's.
      traced: the one that the call is given: a copy, or the same.
      before: the contents of `traced` before the call.
    """

    given: Any
    traced: Any
    before: Any

    @property
    def is_changed(self) -> bool:
        """True if the call added, removed or replaced elements."""
        after, before = _copy(self.traced), self.before
        return after.keys() != before.keys() or any(after[k] is not before[k] for k in before)


def _pairs(given: Any, traced: Any, seen: set[int], depth: int) -> Iterator[tuple[Any, Any]]:
    """Yields the mutable containers among arguments, and those that a call is given for them."""
    if id(traced) in seen or isinstance(traced, (*_OPAQUE, jax.Array, np.ndarray)):
        return
    seen.add(id(traced))
    if isinstance(traced, (list, tuple)) and isinstance(given, (list, tuple)):
        if type(traced) is list:
            yield given, traced
        for ours, one in zip(given, traced, strict=False):
            yield from _pairs(ours, one, seen, depth)
    elif type(traced) is dict and isinstance(given, dict):
        yield given, traced
        for key in traced:
            yield from _pairs(given.get(key), traced[key], seen, depth)
    elif depth and given is traced and _is_plain(traced):
        yield given, traced
        for value in list(vars(traced).values()):
            yield from _pairs(value, value, seen, depth - 1)


def _is_plain(x: Any) -> bool:
    """Returns whether something is an object of a class written in Python, with attributes."""
    return type(getattr(x, "__dict__", None)) is dict and jax.tree.structure(x).num_leaves == 1


def _contents(container: Any) -> Any:
    return container if isinstance(container, (list, dict)) else vars(container)


def _copy(container: Any) -> dict[Any, Any]:
    """Returns the elements of a container by place, key or name."""
    contents = _contents(container)
    return dict(enumerate(contents) if isinstance(contents, list) else contents)


def _put(container: Any, contents: dict[Any, Any]) -> None:
    own = _contents(container)
    own.clear()
    if isinstance(own, list):
        own.extend(contents.values())
    else:
        own.update(contents)


class UnreturnableError(TypeError):
    """Raised for a returned object that is no pytree and holds, or may hold, tracers."""

    def __init__(self, leaf: Any):
        self.name = type(leaf).__name__
        super().__init__(f"{self.name} holds arrays but is not a pytree.")


@dataclasses.dataclass(frozen=True)
class PureCall:
    """A traced call.

    Attributes:
      jaxpr: the program.
      arrays: its operands, as they were given.
      result: the result without its arrays.
      changed: the caller's lists, dicts and objects that the call changes.
      contents: what they hold then, without its arrays.
    """

    jaxpr: Any
    arrays: Sequence[Any]
    result: ArrayTree
    changed: Sequence[Any]
    contents: ArrayTree

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        *trees: Any,
        arguments: Arguments | None = None,
        traced_as: Sequence[Any] | None = None,
    ) -> PureCall:
        """Traces ``call(*trees)``.

        Args:
          call: the function.
          trees: its arguments; leaves that are no arrays are fixed.
          arguments: the trees divided into arrays and others, where they are already.
          traced_as: the arrays to trace it with, which may have other dtypes; None traces it with
            those given.

        Raises:
          UnreturnableError: a leaf of the result is no array, and holds some.
        """
        arguments = arguments or Arguments.of(trees, {})
        arrays = arguments.arrays if traced_as is None else traced_as
        noted: list[Any] = []  # no tracers: their trace has ended when this is read

        def flat(*arrays: Any) -> list[Any]:
            filled, _ = arguments.filled(arrays)
            pairs = _pairs(trees, filled, set(), _DEPTH)
            containers = [_Container(ours, one, _copy(one)) for ours, one in pairs]
            try:
                outputs = call(*filled)
                changed = [each for each in containers if each.is_changed]
                written, contents = ArrayTree.divided([_copy(each.traced) for each in changed])
                dynamic, result = ArrayTree.divided(outputs)
                for leaf in result.static:
                    require_returnable(leaf)
            finally:
                for each in containers:
                    if each.traced is each.given and each.is_changed:  # the caller's own
                        _put(each.traced, each.before)
            noted[:] = result, [each.given for each in changed], contents
            return [*dynamic, *written]

        return cls(jax.make_jaxpr(flat)(*arrays), arguments.arrays, *noted)

    def returned(self, results: Sequence[Any]) -> Any:
        """Returns the result of the function, with the results of the program as its arrays."""
        count = sum(self.result.is_array)
        contents = self.contents.filled(results[count:])
        for container, elements in zip(self.changed, contents, strict=True):
            _put(container, elements)
        return self.result.filled(results[:count])


def require_returnable(leaf: Any) -> None:
    """Raises if a non-array leaf of a result holds, or may hold, tracers.

    Raises:
      UnreturnableError: it has tracers among its attributes, or is a generator, a bound method or a
        closure.
    """
    function = inspect.unwrap(leaf) if callable(leaf) and not isinstance(leaf, type) else None
    function = getattr(function, "func", function)  # of a functools.partial
    is_bound = inspect.ismethod(function) or bool(getattr(function, "__closure__", None))
    held = jax.tree.leaves(getattr(leaf, "__dict__", None))
    if (
        is_bound
        or inspect.isgenerator(leaf)
        or any(isinstance(array, jax.core.Tracer) for array in held)
    ):
        raise UnreturnableError(leaf)

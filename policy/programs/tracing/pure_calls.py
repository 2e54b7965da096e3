"""Calls of functions of trees, as programs of arrays whose results are put back into the tree.

A trace runs on copies of the containers among its arguments, and on the objects themselves.
Afterwards the caller's own hold what the call put there, with arrays in place of tracers.
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

from policy.programs.tracing.trace import Arguments, ArrayTree

_DEPTH = 2  # of objects inside of objects
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, str, bytes, np.generic)


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
        after, before = _contents(self.traced), self.before
        if isinstance(before, list):
            return len(after) != len(before) or any(
                a is not b for a, b in zip(after, before, strict=True)
            )
        return after.keys() != before.keys() or any(after[k] is not before[k] for k in before)


@dataclasses.dataclass(frozen=True)
class Mutations:
    """The changes of a call.

    Attributes:
      changed: the caller's containers.
      contents: what they hold now, without its arrays.
    """

    changed: Sequence[Any]
    contents: ArrayTree

    def apply(self, arrays: Sequence[Any]) -> None:
        """Makes the changes, with the program's results as arrays."""
        for container, contents in zip(self.changed, self.contents.filled(arrays), strict=True):
            _put(container, contents)


class Containers:
    """The mutable containers among the arguments of a call that is being traced.

    Args:
      given: the caller's arguments.
      traced: those that the call is given, of the same structure.
    """

    def __init__(self, given: Any, traced: Any):
        pairs = {id(one): (ours, one) for ours, one in _pairs(given, traced, set(), _DEPTH)}
        self._all = [_Container(ours, one, _copy(one)) for ours, one in pairs.values()]

    def mutations(self) -> tuple[list[Any], Mutations]:
        """Returns the arrays in the changes that the call made, and the changes."""
        changed = [each for each in self._all if each.is_changed]
        arrays, contents = ArrayTree.divided([_copy(each.traced) for each in changed])
        return arrays, Mutations([each.given for each in changed], contents)

    def restore(self) -> None:
        """Puts back the contents of the caller's own containers that the call was given."""
        for each in self._all:
            if each.traced is each.given and each.is_changed:
                _put(each.traced, each.before)


def _pairs(given: Any, traced: Any, seen: set[int], depth: int) -> Iterator[tuple[Any, Any]]:
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


def _copy(container: Any) -> Any:
    contents = _contents(container)
    return list(contents) if isinstance(contents, list) else dict(contents)


def _put(container: Any, contents: Any) -> None:
    own = _contents(container)
    if isinstance(own, list):
        own[:] = contents
        return
    own.clear()
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
      mutations: the changes of the caller's lists, dicts and objects.
    """

    jaxpr: Any
    arrays: Sequence[Any]
    result: ArrayTree
    mutations: Mutations

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        *trees: Any,
        traced_as: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> PureCall:
        """Traces ``call(*trees)``.

        Args:
          call: the function.
          trees: its arguments; leaves that are no arrays are fixed.
          traced_as: gives the arrays to trace it with, which may have other dtypes; None traces it
            with those given.

        Raises:
          UnreturnableError: a leaf of the result is no array, and holds some.
        """
        arguments = Arguments.of(trees, {})
        arrays = arguments.arrays if traced_as is None else traced_as(arguments.arrays)
        noted: list[Any] = []  # no tracers: their trace has ended when this is read

        def flat(*arrays: Any) -> list[Any]:
            filled, _ = arguments.filled(arrays)
            containers = Containers(trees, filled)
            try:
                dynamic, result = ArrayTree.divided(call(*filled))
                for leaf in result.static:
                    require_returnable(leaf)
                written, mutations = containers.mutations()
            finally:
                containers.restore()
            noted[:] = result, mutations
            return [*dynamic, *written]

        return cls(jax.make_jaxpr(flat)(*arrays), arguments.arrays, *noted)

    def returned(self, results: Sequence[Any]) -> Any:
        """Returns the result of the function, with the results of the program as its arrays."""
        count = sum(self.result.is_array)
        self.mutations.apply(results[count:])
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

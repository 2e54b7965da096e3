"""Calls of functions of trees, as programs of arrays whose results are put back into the tree."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from policy.programs.tracing.mutations import Containers, Mutations
from policy.programs.tracing.trace import Arguments, ArrayTree


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

"""Calls of functions of trees, as programs of arrays whose results are put back into the tree."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex_core

from policy._jaxpr.subprograms import opened
from policy._jaxpr.trace import Arguments, is_array


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
      static: the non-array leaves of the result; None in place of arrays.
      is_dynamic: for each leaf of the result, whether it is an array.
      treedef: the tree structure of the result.
    """

    jaxpr: Any
    arrays: Sequence[Any]
    static: Sequence[Any]
    is_dynamic: Sequence[bool]
    treedef: Any

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
        returned: list[Any] = []  # no tracers: their trace has ended when this is read

        def flat(*arrays: Any) -> list[Any]:
            trees, _ = arguments.filled(arrays)
            leaves, treedef = jax.tree.flatten(call(*trees))
            is_dynamic = [is_array(leaf) for leaf in leaves]
            static = [
                None if dynamic else _static(leaf)
                for leaf, dynamic in zip(leaves, is_dynamic, strict=True)
            ]
            returned[:] = static, is_dynamic, treedef
            return [leaf for leaf, dynamic in zip(leaves, is_dynamic, strict=True) if dynamic]

        return cls(jax.make_jaxpr(flat)(*arrays), arguments.arrays, *returned)

    def operands(self) -> list[Any]:
        """Returns for each result of the program the operand that it equals; None if it is
        computed.
        """
        body, _ = opened(self.jaxpr)
        given = dict(zip(body.invars, self.arrays, strict=True))
        return [_given(atom, given) for atom in body.outvars]

    def returned(self, results: Sequence[Any]) -> Any:
        """Returns the result of the function, with the results of the program as its arrays."""
        arrays = iter(results)
        leaves = zip(self.is_dynamic, self.static, strict=True)
        return jax.tree.unflatten(
            self.treedef, [next(arrays) if dynamic else leaf for dynamic, leaf in leaves]
        )


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


def _static(leaf: Any) -> Any:
    require_returnable(leaf)
    return leaf


def _given(atom: Any, given: Mapping[Any, Any]) -> Any:
    return None if isinstance(atom, jex_core.Literal) else given.get(atom)

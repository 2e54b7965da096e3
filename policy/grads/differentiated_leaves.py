"""The leaves of the arguments that a loss is differentiated by, and its program of them alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from policy.core.trees import is_overwritten


@dataclasses.dataclass(frozen=True)
class DifferentiatedLeaves:
    """The leaves of the arguments that a function is differentiated by.

    The function is traced with these alone: other arguments keep their values.

    Attributes:
      args, kwargs: all arguments of the function.
      argnums: the positional arguments that it is differentiated by, as in JAX.
      leaves: the leaves of those arguments.
      overwritten: for each leaf, whether it is one of fp8's that are overwritten with gradients.
      treedef: the structure of the tuple of those arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    argnums: int | Sequence[int]
    leaves: list[Any]
    overwritten: list[bool]
    treedef: Any

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], argnums: int | Sequence[int]
    ) -> DifferentiatedLeaves:
        chosen = tuple(args[position] for position in _positions(argnums))
        found, treedef = jax.tree_util.tree_flatten_with_path(chosen)
        leaves = [leaf for _, leaf in found]
        return cls(
            args, kwargs, argnums, leaves, [is_overwritten(path) for path, _ in found], treedef
        )

    def called(self, function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Calls a function of the arguments with other leaves."""
        full = list(self.args)
        chosen = jax.tree.unflatten(self.treedef, leaves)
        for position, value in zip(_positions(self.argnums), chosen, strict=True):
            full[position] = value
        return function(*full, **self.kwargs)

    def gradients(self, leaves: Sequence[Any]) -> Any:
        """Returns gradients by leaf in the structure that JAX returns them in."""
        chosen = jax.tree.unflatten(self.treedef, leaves)
        return chosen[0] if isinstance(self.argnums, int) else chosen

    def traced(self, function: Callable[..., Any]) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """Returns the jaxpr of a function of the arguments, and one that rebuilds its output, which
        may hold leaves that are no arrays.
        """
        found: list[Any] = []

        def arrays_of(*leaves: Any) -> list[Any]:
            flat, treedef = jax.tree.flatten(self.called(function, leaves))
            is_array = [isinstance(x, _ARRAYS) for x in flat]
            others = [None if a else x for x, a in zip(flat, is_array, strict=True)]
            found[:] = [treedef, is_array, others]
            return [x for x, a in zip(flat, is_array, strict=True) if a]

        jaxpr = jax.make_jaxpr(arrays_of)(*self.leaves)

        def rebuild(arrays: Sequence[Any]) -> Any:
            treedef, is_array, others = found
            rest = iter(arrays)
            filled = [next(rest) if a else x for x, a in zip(others, is_array, strict=True)]
            return jax.tree.unflatten(treedef, filled)

        return jaxpr, rebuild


_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)

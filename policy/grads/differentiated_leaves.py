"""The leaves of the arguments that a loss is differentiated by, and its program of them alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from policy.core.trees import is_overwritten
from policy.programs.trace import ArrayTree


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
        found: list[ArrayTree] = []

        def arrays_of(*leaves: Any) -> list[Any]:
            arrays, rest = ArrayTree.divided(self.called(function, leaves))
            found[:] = [rest]
            return arrays

        jaxpr = jax.make_jaxpr(arrays_of)(*self.leaves)
        return jaxpr, found[0].filled


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)

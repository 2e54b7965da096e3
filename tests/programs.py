"""Reads programs without running them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of a jaxpr.

    Attributes:
      name: the primitive's.
      inputs, outputs: dtype names; "" for what has none.
      scope: the name stack, its names joined by ``/``.
      within: the primitives whose bodies it stands in, outermost first.
      terms: how many numbers go into each number of a plain reduction (`reduce_sum` and its like); else None.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: str
    within: tuple[str, ...]
    terms: int | None = None


def operations(fn: Callable[..., Any], *args: Any) -> list[Operation]:
    """Every equation of `fn`'s jaxpr, bodies of scans, jits and checkpoints included, in order."""
    return operations_of(jax.make_jaxpr(fn)(*args))


def operations_of(jaxpr: Any) -> list[Operation]:
    """`operations` of what `jax.make_jaxpr` returned."""
    return list(_walk(jaxpr.jaxpr, (), ""))


def _walk(jaxpr: Any, within: tuple[str, ...], above: str) -> Iterator[Operation]:
    for eqn in jaxpr.eqns:
        scope = "/".join(part for part in (above, str(eqn.source_info.name_stack)) if part)
        inputs, outputs = (tuple(_dtype(v) for v in vs) for vs in (eqn.invars, eqn.outvars))
        yield Operation(eqn.primitive.name, inputs, outputs, scope, within, _terms(eqn))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner, (*within, eqn.primitive.name), scope)


def _terms(eqn: Any) -> int | None:
    axes = eqn.params.get("axes")
    shape: Any = getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
    if not eqn.primitive.name.startswith("reduce_") or axes is None:
        return None
    return math.prod(int(shape[axis]) for axis in axes)


def _dtype(variable: Any) -> str:
    dtype = getattr(variable.aval, "dtype", None)
    return "" if dtype is None else dtype.name


def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.apply`, without the union that Flax's annotations make of what it returns."""
    return model.apply(*args, **kwargs)


def boundary_casts(ops: list[Operation]) -> list[Operation]:
    """The casts that boundaries put in, inputs and outputs alike."""
    return [op for op in ops if op.name == "convert_element_type" and "policy_boundary" in op.scope]


def named(ops: list[Operation], *names: str) -> list[Operation]:
    return [op for op in ops if op.name in names]


def frozen_biases(variables: Any) -> Any:
    """The variables, with no gradient to biases: those sums are ours, the rest of backward is the hand-threaded one."""

    def frozen(path: Any, leaf: Any) -> Any:
        return jax.lax.stop_gradient(leaf) if getattr(path[-1], "key", None) == "bias" else leaf

    return jax.tree_util.tree_map_with_path(frozen, variables)

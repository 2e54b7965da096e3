"""Reads programs without running them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import jax

from policy.programs.dtypes import dtype_name_of
from policy.programs.primitives import MATMULS
from policy.programs.reading.walk import Site, walk


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation of a jaxpr.

    Attributes:
      name: the primitive's.
      inputs, outputs: dtype names; "" for what has none.
      path: the module path, its names joined by ``/``.
      within: the primitives whose bodies it stands in, outermost first.
      terms: how many numbers go into each number of a plain reduction (`reduce_sum` and its like);
        else None.
      is_backward: whether it is of a backward pass.
      is_placed: whether it is a cast that a boundary, or autocast, put in.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    path: str
    within: tuple[str, ...]
    terms: int | None = None
    is_placed: bool = False
    is_backward: bool = False


def operations(fn: Callable[..., Any], *args: Any) -> list[Operation]:
    """Every equation of `fn`'s jaxpr, bodies of scans, jits and checkpoints included, in order."""
    return operations_of(jax.make_jaxpr(fn)(*args))


def operations_of(jaxpr: Any) -> list[Operation]:
    """`operations` of what `jax.make_jaxpr` returned."""
    return list(map(_operation, walk(jaxpr)))


def _operation(site: Site) -> Operation:
    equation = site.equation
    inputs, outputs = (
        tuple(map(dtype_name_of, variables)) for variables in (equation.invars, equation.outvars)
    )
    place = "/".join(site.path), site.inside
    is_which = site.is_placed, site.is_backward
    return Operation(site.name, inputs, outputs, *place, _terms(equation), *is_which)


def _terms(eqn: Any) -> int | None:
    axes = eqn.params.get("axes")
    shape: Any = getattr(eqn.invars[0].aval, "shape", ()) if eqn.invars else ()
    if not eqn.primitive.name.startswith("reduce_") or axes is None:
        return None
    return math.prod(int(shape[axis]) for axis in axes)


def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.apply`, without the union that Flax's annotations make of what it returns."""
    return model.apply(*args, **kwargs)


def boundary_casts(ops: list[Operation]) -> list[Operation]:
    """The casts that boundaries put in, inputs and outputs alike."""
    return [op for op in ops if op.name == "convert_element_type" and op.is_placed]


MOVES = ("reshape", "broadcast_in_dim", "transpose", "squeeze", "stop_gradient", "copy")


def assert_same_operations(
    f: Any, g: Any, *args: Any, others: tuple[Any, ...] | None = None, besides: Collection[str] = ()
) -> None:
    """Asserts that two programs have the same operations on the same dtypes, as often.

    Operations named in `besides` may differ, such as `MOVES` and casts, whose order may. The second
    program is called with `others`, if these are given.

    Calls of jitted functions count as their bodies: the evaluated programs of users' code have the
    small ones of JAX, such as relu's, inlined.
    """
    first, second = (
        _counted([op for op in operations(function, *given) if op.name not in besides])
        for function, given in ((f, args), (g, args if others is None else others))
    )
    assert first == second, f"only in the first {first - second}, in the second {second - first}"


def _counted(ops: list[Operation]) -> collections.Counter[tuple[str, ...]]:
    calls = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
    return collections.Counter(
        (op.name, *op.inputs, *op.outputs) for op in ops if op.name not in calls
    )


def named(ops: list[Operation], *names: str) -> list[Operation]:
    return [op for op in ops if op.name in names]


def precisions(fn: Callable[..., Any], *args: Any) -> set[tuple[str, str | None]]:
    """Returns (dtype of the first operand, precision) of each matmul and convolution."""
    return {
        (str(site.equation.invars[0].aval.dtype), _precision(site.equation.params["precision"]))
        for site in walk(jax.make_jaxpr(fn)(*args))
        if site.name in MATMULS
    }


def _precision(precision: Any) -> str | None:
    if isinstance(precision, tuple):
        left, precision = precision
        assert left == precision
    if precision is None or isinstance(precision, str):
        return precision
    return precision.name.lower() if isinstance(precision, jax.lax.Precision) else str(precision)


def frozen_biases(variables: Any) -> Any:
    """The variables, with no gradient to biases: those sums are ours, the rest of backward is the
    hand-threaded one.
    """

    def frozen(path: Any, leaf: Any) -> Any:
        is_bias = any(getattr(key, "key", None) == "bias" for key in path)
        return jax.lax.stop_gradient(leaf) if is_bias else leaf

    return jax.tree_util.tree_map_with_path(frozen, variables)

"""Gradients whose sums over the uses of a weight, and over its elements, are in float32.

JAX sums the cotangents of a value in that value's dtype: a bfloat16 parameter with 64 uses gets its
64 contributions added in bfloat16. Here the gradient program is traced, and evaluated with those
sums in float32. The matmuls that make the contributions round them to half precision once, or
return their accumulators (`grads="accumulator"`). Their operands stay in half precision, and so
does every cotangent of an activation.

The sums are those of `policy.grads.rounded_sums`: in programs inside of others (`jit`, `scan`,
`cond`, `checkpoint`, `shard_map`) and in custom derivative rules alike, behind casts, data movement
and products with other weights. An exchange between devices stays in the dtype that JAX gives it;
with accumulators it is in float32, unless `policy.sharding` was asked for another dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import is_overwritten
from policy.grads.rounded_sums import HANDS_ON, RoundedSums, sums_nothing
from policy.programs.dtypes import F32, holds_half
from policy.programs.jaxprs import Equation, Subprogram, bind, opened, programs_of, subprogram
from policy.programs.marks import EXCHANGE, innermost_scope
from policy.programs.primitives import (
    MATMULS,
    ONE_FOR_EACH,
    RUNS_PROGRAMS,
    SUMMING_COLLECTIVES,
)
from policy.programs.rewriting import control_flow
from policy.programs.rewriting.control_flow import Body, has_options
from policy.programs.rewriting.interpreter import Interpreter
from policy.programs.tracing.trace import ArrayTree


def with_float32_sums(
    differentiated: Callable[..., tuple[Any, Any]],
    positions: Sequence[int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    accumulators: bool,
) -> tuple[Any, Any]:
    """Calls a function that returns a value and gradients, and sums the gradients in float32.

    The call is traced with the differentiated arguments alone: others keep their values.

    Args:
      differentiated: returns a pair, whose second part are the gradients of some arguments.
      positions: the positions of those arguments.
      args: the positional arguments of the call.
      kwargs: its keyword arguments.
      accumulators: whether the gradients are accumulators of matmuls, too. Without it, a function
        of float32 weights runs as it is: JAX sums their gradients in float32.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path([args[i] for i in positions])
    leaves, is_weight = [x for _, x in found], [not is_overwritten(path) for path, _ in found]
    halves = [holds_half(x) and one for x, one in zip(leaves, is_weight, strict=True)]
    if not (accumulators or any(halves)):
        return differentiated(*args, **kwargs)
    rest: list[ArrayTree] = []

    def arrays_of(*leaves: Any) -> list[Any]:
        full = list(args)
        for position, arg in zip(positions, jax.tree.unflatten(treedef, leaves), strict=True):
            full[position] = arg
        arrays, other = ArrayTree.divided(differentiated(*full, **kwargs))
        rest[:] = [other]
        return arrays

    jaxpr = jax.make_jaxpr(arrays_of)(*leaves)
    others = len(opened(jaxpr)[0].outvars) - len(leaves)
    is_gradient = [False] * others + is_weight
    return rest[0].filled(evaluated(jaxpr, leaves, is_gradient, accumulators=accumulators))


def evaluated(
    jaxpr: Any, arrays: Sequence[Any], is_gradient: Sequence[bool], *, accumulators: bool
) -> list[Any]:
    """Returns the results of a program, the sums in its gradients in float32.

    Args:
      jaxpr: an open or closed jaxpr that returns gradients, among others.
      arrays: its arguments.
      is_gradient: for each result, whether it is a gradient: one that was summed in half precision,
        or cast from half precision, is returned as the float32 sum before.
      accumulators: whether the results of matmuls and convolutions are such sums.
    """
    sums = RoundedSums.of(jaxpr, is_gradient, accumulators=accumulators)
    body, consts = opened(jaxpr)
    results = Float32Sums(sums).run(body, consts, arrays)
    pairs = zip(results, is_gradient, strict=True)
    return [x.value if one and isinstance(x, Wide) else read(x) for x, one in pairs]


@dataclasses.dataclass(frozen=True)
class Wide:
    """A float32 sum that stands for the half-precision one of the program.

    Attributes:
      value: the float32 array.
      dtype: the half dtype.
    """

    value: Any
    dtype: DTypeLike


def read(x: Any) -> Any:
    """Returns a wide value as the half one that it stands for; others as they are."""
    return x.value.astype(x.dtype) if isinstance(x, Wide) else x


class Float32Sums(Interpreter[Any]):
    """Evaluates gradient programs on values that are arrays, or `Wide` ones.

    Args:
      sums: the sums that a gradient widens.
    """

    def __init__(self, sums: RoundedSums):
        super().__init__()
        self.sums = sums

    def literal(self, literal: Any) -> Any:
        return literal.val

    def arrays(self, value: Any) -> tuple[Any]:
        return (value.value if isinstance(value, Wide) else value,)

    def filled(self, value: Any, arrays: Sequence[Any]) -> Any:
        (array,) = arrays
        return dataclasses.replace(value, value=array) if isinstance(value, Wide) else array

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        is_wide = any(isinstance(x, Wide) for x in values)
        name = equation.primitive.name
        if name in RUNS_PROGRAMS and (is_wide or self._holds_some(equation)):
            return self._run_programs(equation, values)
        if not self.sums.rounded.isdisjoint(equation.outvars):
            return [_unrounded(equation, values)]
        if not is_wide:
            return bind(equation, values)
        results = self._moved(equation, values)
        return bind(equation, [read(x) for x in values]) if results is None else results

    def _moved(self, equation: Equation, values: list[Any]) -> list[Any] | None:
        """Returns the results of an operation that moves or widens wide values, or None."""
        name = equation.primitive.name
        if name == "convert_element_type":
            new = equation.params["new_dtype"]
            return bind(equation, [values[0].value]) if jnp.dtype(new).itemsize >= 4 else None
        if (name in HANDS_ON or sums_nothing(equation)) and isinstance(values[0], Wide):
            return [_like(values[0], x) for x in bind(equation, [values[0].value, *values[1:]])]
        if name in ONE_FOR_EACH and not self._is_in_its_dtype(equation):
            results = bind(equation, [x.value if isinstance(x, Wide) else x for x in values])
            return [
                _like(x, y) if isinstance(x, Wide) else y
                for x, y in zip(values, results, strict=True)
            ]
        return None

    def _is_in_its_dtype(self, equation: Equation) -> bool:
        """Returns whether an equation is an exchange that keeps its dtype."""
        if equation.primitive.name not in SUMMING_COLLECTIVES:
            return False
        return not self.sums.accumulators or innermost_scope(equation) == EXCHANGE

    def _holds_some(self, equation: Equation) -> bool:
        return any(self.sums.within(program).rounded for program in programs_of(equation))

    def _run_programs(self, equation: Equation, values: list[Any]) -> list[Any]:
        if equation.primitive.name == "jit" and not has_options(equation):
            kinds = tuple(x.dtype if isinstance(x, Wide) else None for x in values)
            program = subprogram(equation, "call")
            sums = self.sums.within(program.body)
            call, body = _jitted(sums, program, kinds, equation.params["name"])
            results = call(*self.flat(values))
            return self.refilled(body.outputs, results)
        handler = control_flow.handler_of(equation)
        if handler is None:
            return bind(equation, [read(x) for x in values])
        return handler(self, equation, values)

    def merge(
        self, equation: Equation, values: Sequence[Any], branches: Sequence[Any] = ()
    ) -> list[Any]:
        """Returns wide values for the results in half precision that a gradient widens."""
        return [
            Wide(variable.aval, variable.aval.dtype)
            if variable in self.sums.widened and holds_half(variable.aval)
            else variable.aval
            for variable in equation.outvars
        ]

    def settled(self, value: Any, like: Any) -> Any:
        if isinstance(like, Wide):
            return value if isinstance(value, Wide) else Wide(_widened(value), like.dtype)
        return read(value)


def _unrounded(equation: Equation, values: Sequence[Any]) -> Wide:
    """Returns the result of a sum, a product or a cast, before it is rounded."""
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    if name in MATMULS:
        params = equation.params | {"preferred_element_type": F32}
        (result,) = bind(equation, [read(x) for x in values], params)
    elif name == "convert_element_type":
        (result,) = values
    elif name == "scatter-add":
        result = _scatter_add(equation, [_widened(x) for x in values])
    else:
        (result,) = bind(equation, [_widened(x) for x in values])
    return Wide(result, dtype)


def _scatter_add(equation: Equation, operands: list[Any]) -> jax.Array:
    """Binds the equation for another dtype: it holds a program that adds two numbers of one."""
    params, (operand, indices, updates) = equation.params, operands
    return lax.scatter_add(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


def _like(wide: Wide, value: Any) -> Wide:
    return Wide(value, wide.dtype)


def _widened(x: Any) -> Any:
    """Returns a wide value's float32 array, and half-precision arrays cast to float32."""
    if isinstance(x, Wide):
        return x.value
    return jnp.asarray(x).astype(F32) if holds_half(jax.typeof(x)) else x


@functools.lru_cache(maxsize=1024)
def _jitted(
    sums: RoundedSums, program: Subprogram, kinds: tuple[Any, ...], name: str
) -> tuple[Any, Body[Any]]:
    inputs = [None if dtype is None else Wide(None, dtype) for dtype in kinds]
    body = Body(Float32Sums(sums), program, inputs)

    def call(*arrays: Any) -> list[Any]:
        return body.arrays(*arrays)

    call.__name__ = name
    return jax.jit(call), body

"""Gradients that are the float32 accumulators of the matmuls and sums that make them.

JAX rounds the gradient of a weight that is read in half precision: its matmul returns half
precision, which is cast to float32 then. Here the gradient program is traced, and evaluated with
those matmuls, convolutions and sums returning their accumulators. Their operands stay in half
precision, and so does every cotangent of an activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy._jaxpr import control_flow
from policy._jaxpr.control_flow import Body, has_options
from policy._jaxpr.dtypes import F32, float_dtype
from policy._jaxpr.primitives import LINEAR_IN_ALL, MATMULS, ONE_FOR_EACH, RUNS_PROGRAMS
from policy._jaxpr.protocols import Equation
from policy._jaxpr.subprograms import Subprogram, bind, opened, programs_of, subprogram
from policy.grads.differentiated_leaves import DifferentiatedLeaves
from policy.grads.float32_cotangents import Float32Cotangents, Wide, read
from policy.grads.rounded_sums import HANDS_ON, RoundedSums, sums_nothing


def accumulating_value_and_grad(
    differentiated: Callable[..., tuple[Any, Any]], argnums: int | Sequence[int]
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function like `differentiated`, whose gradients are accumulators.

    Args:
      differentiated: returns a pair, whose second part are the gradients of some arguments.
      argnums: those arguments, as in `jax.grad`.
    """

    @functools.wraps(differentiated)
    def accumulated_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        by = DifferentiatedLeaves.of(args, kwargs, argnums)
        jaxpr, rebuild = by.traced(differentiated)
        others = len(opened(jaxpr)[0].outvars) - len(by.leaves)
        is_gradient = [False] * others + [not one for one in by.overwritten]
        return rebuild(accumulated(jaxpr, by.leaves, is_gradient))

    return accumulated_gradients


def accumulated(jaxpr: Any, arrays: Sequence[Any], is_gradient: Sequence[bool]) -> list[Any]:
    """Returns the results of a program, its gradients without rounding to half precision.

    Args:
      jaxpr: an open or closed jaxpr that returns gradients, among others.
      arrays: its arguments.
      is_gradient: for each result, whether it is a gradient: one in half precision, or cast from
        half precision, is returned as the float32 sum before.
    """
    sums = RoundedSums.of(jaxpr, is_gradient)
    body, consts = opened(jaxpr)
    results = AccumulatorGradients(sums).run(body, consts, arrays)
    pairs = zip(results, is_gradient, strict=True)
    return [x.value if one and isinstance(x, Wide) else read(x) for x, one in pairs]


class AccumulatorGradients(Float32Cotangents):
    """Evaluates gradient programs; sums that would be rounded are `Wide` values.

    Args:
      sums: the sums that a gradient widens.
    """

    def __init__(self, sums: RoundedSums):
        super().__init__()
        self.sums = sums

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        is_wide = any(isinstance(x, Wide) for x in values)
        name = equation.primitive.name
        if name in RUNS_PROGRAMS and (is_wide or self._holds_some(equation)):
            return self._run_programs(equation, values)
        if not self.sums.rounded.isdisjoint(equation.outvars):
            return [_unrounded(equation, [read(x) for x in values])]
        if not is_wide:
            return bind(equation, values)
        results = _moved(equation, values)
        return bind(equation, [read(x) for x in values]) if results is None else results

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
            Wide(variable.aval, dtype, is_exact=False)
            if variable in self.sums.widened and dtype is not None and dtype.itemsize < F32.itemsize
            else variable.aval
            for variable in equation.outvars
            for dtype in (float_dtype(variable.aval),)
        ]

    def settled(self, value: Any, like: Any) -> Any:
        if isinstance(like, Wide):
            return value if isinstance(value, Wide) else _wide(value)
        return read(value)


def _wide(x: Any) -> Wide:
    return Wide(jnp.asarray(x).astype(F32), jnp.asarray(x).dtype, is_exact=False)


def _unrounded(equation: Equation, operands: list[Any]) -> Wide:
    """Returns the result of a sum, or of a cast, before it is rounded."""
    dtype = equation.outvars[0].aval.dtype
    if equation.primitive.name in MATMULS:
        (sums,) = bind(equation, operands, equation.params | {"preferred_element_type": F32})
    elif equation.primitive.name == "convert_element_type":
        (sums,) = operands
    elif equation.primitive.name == "scatter-add":
        sums = _scatter_add(equation, [_widened(x) for x in operands])
    else:
        (sums,) = bind(equation, [_widened(x) for x in operands])
    return Wide(sums, dtype, is_exact=False)


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


def _moved(equation: Equation, values: list[Any]) -> list[Any] | None:
    """Returns the results of an operation that moves, combines or widens wide values, or None."""
    name = equation.primitive.name
    if name == "convert_element_type":
        new = equation.params["new_dtype"]
        return bind(equation, [values[0].value]) if jnp.dtype(new).itemsize >= 4 else None
    if (name in HANDS_ON or sums_nothing(equation)) and isinstance(values[0], Wide):
        return [_like(values[0], x) for x in bind(equation, [values[0].value, *values[1:]])]
    if name in ONE_FOR_EACH:
        results = bind(equation, [x.value if isinstance(x, Wide) else x for x in values])
        return [
            _like(x, y) if isinstance(x, Wide) else y for x, y in zip(values, results, strict=True)
        ]
    if name in LINEAR_IN_ALL:
        dtype = equation.outvars[0].aval.dtype
        return [Wide(x, dtype, is_exact=False) for x in bind(equation, list(map(_widened, values)))]
    return None


def _like(wide: Wide, value: Any) -> Wide:
    return Wide(value, wide.dtype, is_exact=False)


def _widened(x: Any) -> Any:
    """Returns a wide value's float32 array, and half-precision arrays cast to float32."""
    if isinstance(x, Wide):
        return x.value
    dtype = float_dtype(jax.typeof(x))
    return x if dtype is None or dtype.itemsize >= F32.itemsize else jnp.asarray(x).astype(F32)


@functools.lru_cache(maxsize=1024)
def _jitted(
    sums: RoundedSums, program: Subprogram, kinds: tuple[Any, ...], name: str
) -> tuple[Any, Body[Any]]:
    inputs = [None if dtype is None else Wide(None, dtype, is_exact=False) for dtype in kinds]
    body = Body.of(AccumulatorGradients(sums), program, inputs)

    def call(*arrays: Any) -> list[Any]:
        return body.arrays(*arrays)

    call.__name__ = name
    return jax.jit(call), body

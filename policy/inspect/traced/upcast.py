"""Programs with every half float upcast to float32: references for programs in half precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.traced.passes import ALL_PASSES
from policy.inspect.traced.placed import NO_REFERENCE, PlacedInterpreter, PlacedValue, Reference
from policy.programs.dtypes import F32, holds_half, is_half
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    bind,
    is_jaxpr,
    opened,
    programs_of,
)
from policy.programs.primitives import HOST, MATMULS, READS_BITS
from policy.programs.rewriting.interpreter import handler_of


def wide_dtype(dtype: DTypeLike) -> Any:
    """Returns float32 for a half float; any other dtype as it is."""
    return F32 if is_half(dtype) else dtype


def dtype_of(atom: Any) -> Any:
    """Returns the dtype that a variable was traced with, or None."""
    return getattr(atom.aval, "dtype", None)


def widen(array: Any) -> Any:
    """Returns an array in float32 if it is half; any other as it is."""
    return lax.convert_element_type(array, F32) if holds_half(array) else array


def narrowed(array: Any, dtype: DTypeLike) -> Any:
    """Returns an array in the half dtype that its variable was traced with."""
    if dtype is None or not is_half(dtype) or array.dtype == dtype:
        return array
    return lax.convert_element_type(array, dtype)


class Upcast(PlacedInterpreter):
    """Runs a program with its half values in float32. Each value is one array.

    Args:
      kept: the equations, by those around them and their `id`, that round to int8 codes: their
        operand is handed on in float32.
    """

    def __init__(
        self,
        kept: Collection[tuple[tuple[int, ...], int]] = (),
        reference: Reference = NO_REFERENCE,
    ):
        super().__init__(reference)
        self.kept = kept

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if self.kept and (self.chain, id(equation)) in self.kept:
            return [PlacedValue([widen(values[0].arrays[0])])]
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        if equation.primitive.name in HOST and not equation.outvars:
            return []
        return self.evaluated(equation, values)

    def evaluated(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        """Returns the outputs of an equation without programs."""
        arrays = bound_wide(equation, [widen(value.arrays[0]) for value in values])
        return [PlacedValue([array]) for array in arrays]


def bound_wide(equation: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation on widened operands; as traced where it takes none."""
    name = equation.primitive.name
    has_half = any(holds_half(atom.aval) for atom in (*equation.invars, *equation.outvars))
    if name == "convert_element_type" and is_half(equation.params["new_dtype"]):
        array = arrays[0]
        return [lax.convert_element_type(array, F32) if array.dtype != F32 else array]
    if name == "reduce_precision" and has_half and keeps(equation, dtype_of(equation.invars[0])):
        return list(arrays)
    if has_half and (name in HOST or name in READS_BITS):
        return _as_traced(equation, arrays)
    params = {key: _wide_param(value) for key, value in equation.params.items()}
    if name in MATMULS and _are_wide_codes(equation, arrays):
        params["preferred_element_type"] = F32
        params["precision"] = ALL_PASSES
        return bind(equation, [lax.convert_element_type(array, F32) for array in arrays], params)
    if name in MATMULS:
        params["precision"] = _highest(equation)
    try:
        outputs = bind(equation, arrays, params)
    except (TypeError, ValueError, NotImplementedError):  # it takes half precision alone
        return _as_traced(equation, arrays)
    expected = [wide_dtype(dtype) for dtype in map(dtype_of, equation.outvars)]
    if [getattr(output, "dtype", None) for output in outputs] != expected:
        return _as_traced(equation, arrays)
    return outputs


def _are_wide_codes(equation: Equation, arrays: Sequence[Any]) -> bool:
    """Returns whether a matmul of int8 codes is given operands that were not rounded to them."""
    pairs = zip(map(dtype_of, equation.invars), arrays, strict=True)
    return any(dtype == np.int8 and jnp.issubdtype(x.dtype, jnp.floating) for dtype, x in pairs)


def _as_traced(equation: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on operands rounded to the dtypes that it was traced with."""
    operands = [
        narrowed(array, dtype_of(atom)) for atom, array in zip(equation.invars, arrays, strict=True)
    ]
    return [widen(output) for output in bind(equation, operands)]


def keeps(equation: Equation, dtype: DTypeLike) -> bool:
    """Returns whether a `reduce_precision` rounds nothing of numbers of a dtype."""
    info, params = jnp.finfo(dtype), equation.params
    return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant


def _highest(equation: Equation) -> Any:
    """Returns the precision of full float32, as GPUs and TPUs multiply in fewer bits by default."""
    is_float = any(jnp.issubdtype(dtype, jnp.floating) for dtype in map(dtype_of, equation.invars))
    return ALL_PASSES if is_float else equation.params.get("precision")


def _wide_param(value: Any) -> Any:
    """Returns a parameter with float32 for every half dtype in it, also in programs."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return wide_dtype(np.dtype(value))
    if is_jaxpr(value):
        return wide_program(value)
    if isinstance(value, tuple) and any(
        is_jaxpr(v) or isinstance(v, (tuple, np.dtype)) for v in value
    ):
        return getattr(value, "_make", type(value))([_wide_param(item) for item in value])
    return value


def wide_program(program: Any) -> Any:
    """Returns a jaxpr with every half float widened, open or closed as it was."""
    body, consts = opened(program)
    if not any(is_half(dtype) for dtype in dtypes_of(body)):
        return program
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, wide_dtype(v.aval.dtype)) for v in body.invars]

    def run(*arrays: Any) -> list[Any]:
        known = [PlacedValue([widen(const)]) for const in consts]
        outputs = Upcast().run(body, known, [PlacedValue([array]) for array in arrays])
        return [widen(output.arrays[0]) for output in outputs]

    closed = jax.make_jaxpr(run)(*inputs)
    return closed if hasattr(program, "consts") else closed.jaxpr


def dtypes_of(jaxpr: OpenJaxpr) -> list[Any]:
    """Returns the dtypes in an open jaxpr and in the programs inside it."""
    variables = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars]
    inner: list[Any] = []
    for equation in jaxpr.eqns:
        variables += equation.outvars
        for program in programs_of(equation):
            inner += dtypes_of(program)
    return [dtype for dtype in map(dtype_of, variables) if dtype is not None] + inner

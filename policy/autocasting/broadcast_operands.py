"""Operations whose derivatives are sums, on half-precision activations.

Cotangents are summed in float32 and rounded once, as those of parameters are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

from policy.autocasting.values import CastValue, as_dtype, cast, is_half_value
from policy.functions.checkpointing import keeping_inputs
from policy.programs.dtypes import F32, is_floating_dtype
from policy.programs.primitives import BROADCASTS, COUNTS_TIES, REPEATS
from policy.programs.protocols import Equation
from policy.programs.rewriting import broadcasting
from policy.programs.subprograms import bind

_FEW_TERMS = 4  # as many as windows of 3x3 with strides of 2 overlap: a sum that rounds three times


def is_broadcast(value: CastValue, shape: tuple[Any, ...] | None) -> bool:
    """Returns whether an elementwise operation broadcasts a value that is no constant."""
    return (
        shape is not None
        and value.constant is None
        and is_floating_dtype(value.dtype)
        and value.array.shape != shape
    )


def broadcast_product(
    equation: Equation, values: list[CastValue], arrays: list[Any], dtype: DTypeLike
) -> list[CastValue]:
    """Returns the product or quotient of values in half precision, of which one is broadcast.

    Args:
      equation: a `mul` or a `div`.
      values: its operands.
      arrays: the operands as arrays, read for those that are not broadcast.
      dtype: the half dtype to compute in.
    """
    shape = equation.outvars[0].aval.shape
    a, b = (
        as_dtype(value, F32) if is_broadcast(value, shape) else array
        for value, array in zip(values, arrays, strict=True)
    )
    return [CastValue(broadcasting.product(equation, a, b, dtype))]


def sums_cotangents(equation: Equation, values: Sequence[CastValue]) -> bool:
    """Returns whether the derivative of an equation that moves half values is a sum."""
    if not any(map(is_half_value, values)):
        return False
    name = equation.primitive.name
    if name == "pad":
        return values[1].constant is None
    if name in BROADCASTS | {"tile"}:
        return equation.invars[0].aval.size != equation.outvars[0].aval.size
    return name in REPEATS or (name in COUNTS_TIES and _overlapping(equation) > _FEW_TERMS)


def _overlapping(equation: Equation) -> float:
    """Returns how many windows an element can be in; infinity without windows."""
    params = equation.params
    if "window_strides" not in params:
        return math.inf
    pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return math.prod(-(-width // step) for width, step in pairs)


def widened_operand(equation: Equation, values: Sequence[CastValue]) -> list[CastValue]:
    """Evaluates an equation that moves half values in float32, and casts its results back.

    The residuals are integers, or the half values themselves.
    """
    dtypes = [value.dtype for value in values if is_floating_dtype(value.dtype)]

    def run(*arrays: Any) -> list[Any]:
        outputs = bind(equation, arrays)
        floats = [output for output in outputs if is_floating_dtype(output.dtype)]
        back = iter(dtypes if len(dtypes) == len(floats) else dtypes[:1] * len(floats))
        return [cast(o, next(back)) if is_floating_dtype(o.dtype) else o for o in outputs]

    if equation.primitive.name not in COUNTS_TIES:
        return list(map(CastValue, run(*(widened(value) for value in values))))
    kept = keeping_inputs(lambda *arrays: run(*(widened(CastValue(array)) for array in arrays)))
    return list(map(CastValue, kept(*(value.array for value in values))))


def widened(value: CastValue) -> Any:
    return as_dtype(value, F32) if is_half_value(value) else value.array

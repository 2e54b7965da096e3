"""Broadcasting of half-precision activations.

Their cotangents are summed in float32 and rounded once, as those of parameters are.
"""

from __future__ import annotations

from typing import Any

from jax.typing import DTypeLike

from policy._jaxpr import broadcasting as repeats
from policy._jaxpr.dtypes import F32
from policy._jaxpr.primitives import BROADCASTS
from policy._jaxpr.protocols import Equation
from policy.autocast.values import CastValue, as_dtype

# Primitives that repeat elements of their operand: the transpose sums over the copies.
REPEATS = BROADCASTS | {"tile"}


def broadcasts_half(value: CastValue, shape: tuple[Any, ...] | None, half: Any) -> bool:
    """Returns whether an elementwise operation in `half` broadcasts a half-precision activation."""
    if shape is None or value.dtype != half or half == F32 or value.constant is not None:
        return False
    return bool(value.array.ndim) and value.array.shape != shape


def broadcast_product(
    equation: Equation, values: list[CastValue], arrays: list[Any], dtype: DTypeLike
) -> list[CastValue]:
    """Returns the product or quotient of half values, of which at least one is broadcast.

    Args:
      equation: a `mul` or a `div`.
      values: its operands.
      arrays: the operands as arrays, read for those that are not broadcast.
      dtype: the half dtype to compute in.
    """
    shape = equation.outvars[0].aval.shape
    a, b = (
        as_dtype(value, F32) if broadcasts_half(value, shape, dtype) else array
        for value, array in zip(values, arrays, strict=True)
    )
    return [CastValue(repeats.product(equation, a, b, dtype))]

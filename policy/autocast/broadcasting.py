"""Half activations that are broadcast: their cotangents are summed in float32 and rounded once, as
parameters' are.
"""

from __future__ import annotations

from typing import Any

from policy._jaxpr import broadcasting as repeats
from policy._jaxpr.primitives import BROADCASTS
from policy.autocast.values import F32, Value, as_dtype

# They repeat the numbers of their operand: the transpose sums over the copies.
REPEATS = BROADCASTS | {"tile"}


def is_repeated(value: Value, shape: tuple[Any, ...] | None, half: Any) -> bool:
    """Returns whether an elementwise operation in `half` repeats the numbers of a half activation
    along axes.
    """
    if shape is None or value.dtype != half or half == F32 or value.constant is not None:
        return False
    return bool(value.array.ndim) and value.array.shape != shape


def product(equation: Any, values: list[Value], arrays: list[Any], dtype: Any) -> list[Value]:
    """The product or quotient of two half values of which at least one is repeated; `arrays` holds
    the others.
    """
    shape = equation.outvars[0].aval.shape
    a, b = (
        as_dtype(value, F32) if is_repeated(value, shape, dtype) else array
        for value, array in zip(values, arrays, strict=True)
    )
    return [Value(repeats.product(equation, a, b, dtype))]

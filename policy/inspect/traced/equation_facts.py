"""Dtypes in which equations run, and their costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from policy.programs import primitives
from policy.programs.dtypes import HALVES, WIDES, dtype_name_of, is_eight_bits, is_inexact_name
from policy.programs.jaxprs import Equation
from policy.programs.primitives import kind_of


def sums(equation: Equation) -> bool:
    """Returns whether an equation adds numbers one by one, as a sum, a scatter or a collective."""
    name = equation.primitive.name
    return kind_of(name) in ("reduction", "scatter-add") or name in primitives.SUMMING_COLLECTIVES


def operands_of(equation: Equation) -> tuple[str, ...]:
    """Returns the dtypes of the inexact operands of an equation, or of all if none is inexact; of
    attention in one kernel those of queries, keys and values, of a ragged matmul not its sizes, and
    of a matmul with scales not these.
    """
    name, pairs = equation.primitive.name, primitives.MATMULS | primitives.SCALED_DOTS
    multiplied = 3 if name in primitives.ATTENTIONS else 2 if name in pairs else None
    dtypes = [dtype for atom in equation.invars[:multiplied] if (dtype := dtype_name_of(atom))]
    numbers = [dtype for dtype in dtypes if is_inexact_name(dtype)]
    return tuple(numbers or dtypes)


def result_of(equation: Equation) -> str:
    """Returns the dtype of the first result of an equation; "" if it has none."""
    return dtype_name_of(equation.outvars[0]) if equation.outvars else ""


def accumulation_of(equation: Equation) -> str:
    """Returns the declared accumulation dtype of an equation; see `Operation.accumulation`."""
    kind, operands = kind_of(equation.primitive.name), operands_of(equation)
    if kind in ("dot", "convolution"):
        return _of_matmul(equation, operands)
    if sums(equation):
        return operands[0] if operands else ""
    return ""


def float32_precision_of(equation: Equation) -> str:
    """Returns the precision of a matmul of float32 operands; see `Operation.precision`."""
    if kind_of(equation.primitive.name) not in ("dot", "convolution"):
        return ""
    if any(dtype != "float32" for dtype in operands_of(equation)):
        return ""
    precision = equation.params.get("precision")
    if precision is None:
        return "default"
    if isinstance(precision, tuple):
        levels = sorted(set(precision), key=lambda each: each.value, reverse=True)
        return ", ".join(level.name.lower() for level in levels)
    return precision.name.lower() if isinstance(precision, lax.Precision) else str(precision)


def _of_matmul(equation: Equation, operands: tuple[str, ...]) -> str:
    """Returns the accumulation dtype of a matmul.

    It is the declared one, or else that of a wide result; "backend" if both the operands and the
    result are narrow.
    """
    declared = getattr(equation.params.get("precision"), "accumulation_type", None)
    if declared is not None:
        return str(np.dtype(declared))
    preferred = equation.params.get("preferred_element_type")
    preferred = None if preferred is None else str(np.dtype(preferred))
    narrow = {dtype for dtype in operands if dtype in HALVES or is_eight_bits(dtype)} - {"int8"}
    if preferred in WIDES or not narrow:
        return preferred or (operands[0] if operands else "")
    return "backend"


def size(shape: Sequence[Any]) -> int:
    """Returns the number of elements of a shape. A symbolic dimension counts as one."""
    return math.prod(dim if isinstance(dim, int) else 1 for dim in shape)


def bytes_of(equation: Equation) -> int:
    """Returns the bytes of the operands and results of an equation, its traffic if not fused."""
    return sum(array_bytes(atom.aval) for atom in (*equation.invars, *equation.outvars))


def array_bytes(aval: Any) -> int:
    """Returns the size of an array in bytes; 0 for non-arrays."""
    itemsize = int(getattr(getattr(aval, "dtype", None), "itemsize", 0))
    return size(getattr(aval, "shape", ())) * itemsize


def flops_of(equation: Equation) -> int:
    """Returns the floating-point operations of an equation.

    A product in a matmul counts as two operations; each number that is summed or computed counts as
    one, also that of an exponential. Attention in one kernel counts as its two matmuls of all pairs
    of queries and keys, its backward pass as four. Operations on integers count as zero, but for
    matmuls and convolutions of int8, and so does the work inside other kernels, factorizations and
    transforms.
    """
    name = equation.primitive.name
    if name in primitives.ATTENTIONS:
        return _attention(equation)
    kind = kind_of(name)
    counted = ("int8", "uint8") if kind in ("dot", "convolution") else ()
    dtypes = map(dtype_name_of, equation.invars)
    are_numbers = [is_inexact_name(dtype) or dtype in counted for dtype in dtypes]
    numbers = [atom.aval for atom in itertools.compress(equation.invars, are_numbers)]
    if not numbers or kind in ("opaque", "cast") or name in primitives.FREE or not equation.outvars:
        return 0
    result = size(getattr(equation.outvars[0].aval, "shape", ()))
    if kind in ("dot", "convolution"):
        return (_dot if kind == "dot" else _convolution)(equation, result)
    if name in primitives.WINDOWED:
        return result * size(equation.params["window_dimensions"])
    if kind == "scatter-add":
        return size(equation.invars[-1].aval.shape)
    if kind == "reduction" or name.startswith(("reduce_", "arg")):
        return size(numbers[0].shape)
    return result


def _dot(equation: Equation, result: int) -> int:
    contracted, left = contracted_axes(equation), equation.invars[0].aval.shape
    if contracted is None:  # fused attention in 8 bits
        return 0
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    if ragged and ragged.lhs_ragged_dimensions[0] in contracted:  # each row is of one group
        result //= max(int(equation.invars[2].aval.shape[-1]), 1)
    return 2 * result * size([left[axis] for axis in contracted])


def contracted_axes(equation: Equation) -> tuple[int, ...] | None:
    """Returns the axes of a matmul's left operand that are contracted, or None if it has none."""
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else equation.params.get("dimension_numbers")
    if numbers is None:  # those of scaled ones are (batch, rows, contracted)
        return (2,) if equation.primitive.name in primitives.SCALED_DOTS else None
    (contracted, _), _ = numbers
    return tuple(contracted)


def _attention(equation: Equation) -> int:
    query, key, value = (atom.aval.shape for atom in equation.invars[:3])
    # (B..., T, N, H), or (B..., N, T, H) by cuDNN's second layout
    keys = key[-2] if int(equation.params.get("layout", 0)) == 1 else key[-3]
    stage = equation.params.get("stage", equation.primitive.name)
    forward = 2 * size(query[:-1]) * size((keys,)) * size((query[-1] + value[-1],))
    return forward if "fwd" in stage or stage.startswith("forward") else 2 * forward


def _convolution(equation: Equation, result: int) -> int:
    kernel = equation.invars[1].aval.shape
    numbers = equation.params["dimension_numbers"]
    outputs = size((kernel[numbers.rhs_spec[0]],))
    # zeros between the rows are not multiplied
    dilation = size(equation.params.get("lhs_dilation") or ())
    batches = equation.params.get("batch_group_count", 1)
    return 2 * result * size(kernel) // max(outputs * dilation * batches, 1) * batches

"""Costs of one run of an equation: floating-point operations, and bytes read and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from policy.programs.operations import dtype_name_of, is_inexact_name, kind_of
from policy.programs.primitives import FREE, WINDOWED
from policy.programs.protocols import Equation


def size(shape: Sequence[Any]) -> int:
    """Returns the number of elements of a shape. A symbolic dimension counts as one."""
    return math.prod(dim if isinstance(dim, int) else 1 for dim in shape)


def bytes_of(equation: Equation) -> int:
    """Returns the bytes of the operands and results of an equation, its traffic if not fused."""
    return sum(array_bytes(atom.aval) for atom in (*equation.invars, *equation.outvars))


def array_bytes(aval: Any) -> int:
    """Returns the size of an array in bytes; 0 for non-arrays."""
    dtype = getattr(aval, "dtype", None)
    return (
        0
        if dtype is None
        else size(getattr(aval, "shape", ())) * int(getattr(dtype, "itemsize", 0))
    )


def flops_of(equation: Equation) -> int:
    """Returns the floating-point operations of an equation.

    A product in a matmul counts as two operations; each number that is summed or computed counts as
    one, also that of an exponential. Operations on integers count as zero, but for matmuls and
    convolutions of int8, and so does the work inside kernels, factorisations and transforms.
    """
    name = equation.primitive.name
    kind = kind_of(name)
    counted = ("int8", "uint8") if kind in ("dot", "convolution") else ()
    numbers = [
        atom.aval
        for atom in equation.invars
        if is_inexact_name(dtype_name_of(atom)) or dtype_name_of(atom) in counted
    ]
    if not numbers or kind in ("opaque", "cast") or name in FREE or not equation.outvars:
        return 0
    result = size(getattr(equation.outvars[0].aval, "shape", ()))
    if kind == "dot":
        return _dot(equation, result)
    if kind == "convolution":
        return _convolution(equation, result)
    if name in WINDOWED:
        return result * size(equation.params["window_dimensions"])
    if kind == "scatter-add":
        return size(equation.invars[-1].aval.shape)
    if kind == "reduction" or name.startswith(("reduce_", "arg")):
        return size(numbers[0].shape)
    return result


def _dot(equation: Equation, result: int) -> int:
    numbers = equation.params.get("dimension_numbers")
    if numbers is None:  # fused attention: queries, keys and values
        return 0
    numbers = getattr(numbers, "dot_dimension_numbers", numbers)
    (contracted, _), _ = numbers
    left = equation.invars[0].aval.shape
    if equation.primitive.name == "ragged_dot_general" and len(equation.outvars[0].aval.shape) > 2:
        result = result // max(
            int(equation.outvars[0].aval.shape[0]), 1
        )  # each row is of one group
    return 2 * result * size([left[axis] for axis in contracted])


def _convolution(equation: Equation, result: int) -> int:
    kernel = equation.invars[1].aval.shape
    numbers = equation.params["dimension_numbers"]
    outputs = kernel[numbers.rhs_spec[0]]
    dilation = size(
        equation.params.get("lhs_dilation") or ()
    )  # zeros between the rows are not multiplied
    batches = equation.params.get("batch_group_count", 1)
    return 2 * result * size(kernel) // max(size((outputs,)) * dilation * batches, 1) * batches

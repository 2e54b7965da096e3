"""Matmuls and convolutions, in compute_dtype or in 8 bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.autocasting.settings import Place
from policy.autocasting.source_lines import multiplies_for_linear_algebra
from policy.autocasting.values import CastValue, Values, as_traced, bound, bound_as_traced, cast
from policy.core.dtypes import ScaledMatmul, canonical_precision
from policy.eight_bits import scaled_convolution, scaled_matmul, scaled_ragged
from policy.functions.reductions import accumulating
from policy.programs.dtypes import F32
from policy.programs.jaxprs import Equation, bind
from policy.quantized import products
from policy.quantized.array import QuantizedArray


def computed(equation: Equation, values: Values, place: Place) -> tuple[str, Values]:
    """Evaluates a matmul or convolution with its operands and result in compute_dtype."""
    if _is_outer_product(equation, values):
        return "float32", [_outer_product(equation, values)]
    params, dtype = dict(equation.params), place.compute
    precision = params.get("precision")
    if precision is not None and multiplies_for_linear_algebra(equation):
        return "float32", bound_as_traced(equation, values)
    is_algorithm = precision is not None and not isinstance(precision, (tuple, list, lax.Precision))
    if is_algorithm and dtype not in (getattr(precision, "supported_lhs_types", None) or ()):
        return "author's algorithm", bound_as_traced(equation, values)
    if precision is None and place.precision is not None:
        params["precision"] = canonical_precision(place.precision)
    is_unrounded = _is_unrounded(equation, place)
    is_scaled = place.matmul is not None and (precision is None or not is_unrounded)
    if is_unrounded and not is_scaled:
        return str(dtype), [_unrounded(equation, params, values, dtype)]
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if equation.primitive.name == "dot_general" and place.matmul is None:
        stored = [side for side in (0, 1) if stored_codes(values[side]) is not None]
        if len(stored) == 1:
            return str(dtype), [_of_codes(params, values, stored[0], dtype)]
    arrays = [value.as_dtype(dtype) if value.is_float else value.array for value in values]
    weights = [i for i, value in enumerate(values[:2]) if value.yields and not value.is_mask]
    by = place.matmul if len(weights) == 1 else None
    if by is not None and _may_be_scaled(equation, arrays, by, weights[0]):
        result = F32 if is_unrounded else dtype
        product = _scaled(equation, arrays, by, weights[0], result)
        return str(by.operands), [CastValue(cast(product, result))]
    if is_unrounded:
        return str(dtype), [_unrounded(equation, params, values, dtype)]
    return str(dtype), bound(equation, arrays, params)


def _is_unrounded(equation: Equation, place: Place) -> bool:
    """Returns whether a line asks for the float32 result of half-precision operands, by a precision
    of its own or by ``preferred_element_type``.
    """
    if place.compute == F32 or "transpose(" in str(equation.source_info.name_stack):
        return False
    precision = equation.params.get("precision")
    return place.is_unrounded or (precision is not None and precision != _named(place.around))


@functools.cache
def _named(precision: str | None) -> Any:
    """Returns `jax_default_matmul_precision` as equations hold it."""
    if precision is None:
        return None
    try:
        return (lax.Precision(precision),) * 2
    except ValueError:
        return lax.DotAlgorithmPreset[precision]


def _unrounded(
    equation: Equation, params: dict[str, Any], values: Values, dtype: np.dtype
) -> CastValue:
    """Returns a float32 product of operands in `dtype`, in which backward multiplies too.

    A tangent is the product in `dtype`, as that of `accumulating`, since its transpose is backward.
    """
    operands = [v.as_dtype(dtype) if v.is_float else v.array for v in values]

    def multiply(*operands: Any, preferred_element_type: Any = dtype) -> Any:
        result = {"preferred_element_type": np.dtype(preferred_element_type)}
        return bind(equation, operands, params | result)[0]

    if any(value.is_tangent for value in values):
        return CastValue(multiply(*operands).astype(F32))
    return CastValue(accumulating(multiply, F32)(*operands))


def stored_codes(value: CastValue) -> QuantizedArray | None:
    """Returns the codes that a value was widened from, and perhaps transposed."""
    return value.codes if value.transposed is None else value.transposed[0].codes


def _of_codes(params: dict[str, Any], values: Values, side: int, dtype: np.dtype) -> CastValue:
    """Multiplies by a parameter that is stored in 8 or 4 bits, widened a tile at a time.

    Args:
      params: of a `dot_general`.
      values: its operands.
      side: the one that is stored so.
      dtype: of the operands and of the result.
    """
    contracted, batch = (list(map(tuple, pair)) for pair in params.pop("dimension_numbers"))
    transposed, free = values[side].transposed, ()
    if transposed is not None:  # the axes of what was transposed
        of = transposed[1]
        taken = {*contracted[side], *batch[side]}
        free = tuple(i for i in range(len(of)) if i not in taken)
        contracted[side], batch[side] = (
            tuple(of[i] for i in pair[side]) for pair in (contracted, batch)
        )
    operands: list[Any] = [value.as_dtype(dtype) for value in values]
    operands[side] = stored_codes(values[side])
    numbers: Any = contracted, batch
    product = products.dot_general(operands[0], operands[1], numbers, **params)
    if transposed is not None:
        # The other operand's own axes and the batch stand where they stood.
        found = [transposed[1][i] for i in free]
        start = product.ndim - len(free) if side else len(batch[0])
        order = [start + sorted(found).index(i) for i in found]
        axes = [*range(start), *order, *range(start + len(free), product.ndim)]
        product = jnp.transpose(product, axes)
    return CastValue(product)


def _is_outer_product(equation: Equation, values: Values) -> bool:
    """Returns whether an equation multiplies integers or tables, such as positions and frequencies,
    as a dot that sums nothing.
    """
    params = equation.params
    if equation.primitive.name != "dot_general" or params.get("out_sharding") is not None:
        return False
    shape, contracted = equation.invars[0].aval.shape, params["dimension_numbers"][0][0]
    if any(shape[axis] != 1 for axis in contracted):
        return False
    has_integers = any(jnp.issubdtype(value.dtype, jnp.integer) for value in values)
    return has_integers or all(value.is_table or value.yields for value in values)


def _outer_product(equation: Equation, values: Values) -> CastValue:
    """Evaluates a dot that sums nothing as a multiplication, which no device rounds.

    One operand may be of integers: positions, of which `jnp.einsum` makes no floats.
    """
    (contracted, batch), result = equation.params["dimension_numbers"], equation.outvars[0].aval
    arrays = as_traced(equation.invars, values)
    a, b = (
        _rows(array, axes, summed).astype(result.dtype)
        for array, axes, summed in zip(arrays, batch, contracted, strict=True)
    )
    shared, rank = len(batch[0]), result.ndim
    a = lax.expand_dims(a, range(a.ndim, rank))
    b = lax.expand_dims(b, range(shared, shared + rank - b.ndim))
    return CastValue(lax.mul(*jnp.broadcast_arrays(a, b)))


def _rows(array: Any, batch: Sequence[int], contracted: Sequence[int]) -> jax.Array:
    """Returns an operand with its batch axes first, and without those of one element."""
    axes = (*batch, *contracted)
    ends = (*range(len(batch)), *range(-len(contracted), 0))
    ordered = jnp.moveaxis(array, axes, ends)
    return lax.squeeze(ordered, range(ordered.ndim - len(contracted), ordered.ndim))


# --------------------------------------------------------------------------------------------------
# 8 bits
# --------------------------------------------------------------------------------------------------


def _may_be_scaled(
    equation: Equation, arrays: Sequence[Any], by: ScaledMatmul, weight: int
) -> bool:
    """Returns whether a matmul or convolution runs in 8 bits, of which one operand is a parameter.

    Those of a backward pass that was traced do not: backward of operations in 8 bits has its own.

    Args:
      arrays: the operands.
      weight: the operand that is a parameter, by index.
    """
    params = equation.params
    if "transpose(" in str(equation.source_info.name_stack):
        return False
    if equation.primitive.name == "dot_general":
        return params.get("out_sharding") is None
    if equation.primitive.name == "ragged_dot_general":
        lhs, rhs, sizes = arrays
        is_of_weight = weight == 1 and by.blocks is None
        return is_of_weight and scaled_ragged.ragged_may_run_in_8_bits(lhs, rhs, sizes, params)
    is_convolution = equation.primitive.name == "conv_general_dilated" and weight == 1
    groups = params.get("batch_group_count", 1)
    return is_convolution and scaled_convolution.may_run_in_8_bits(arrays[0], arrays[1], by, groups)


def _scaled(
    equation: Equation, arrays: Sequence[Any], by: ScaledMatmul, weight: int, dtype: np.dtype
) -> jax.Array:
    """Returns the result of a matmul in 8 bits in `dtype`, or of a convolution in float32."""
    if equation.primitive.name == "conv_general_dilated":
        options = {name: equation.params[name] for name in scaled_convolution.OPTIONS}
        return scaled_convolution.scaled_conv(arrays[0], arrays[1], by, **options)
    if equation.primitive.name == "ragged_dot_general":
        (lhs, rhs, sizes), numbers = arrays, equation.params["ragged_dot_dimension_numbers"]
        return scaled_ragged.scaled_ragged_dot_general(lhs, rhs, sizes, numbers, by, dtype=dtype)
    numbers, side = equation.params["dimension_numbers"], "rhs" if weight else "lhs"
    lhs, rhs = arrays
    return scaled_matmul.scaled_dot_general(lhs, rhs, numbers, by, weight=side, dtype=dtype)

"""Matmuls, convolutions and lookups of arrays that are stored as codes.

Codes are widened inside of the operation, forward and backward: its residuals are the codes and the
scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.core.dtypes import backend
from policy.core.einsums import DimensionNumbers
from policy.core.param_formats import ParamFormat
from policy.functions.reductions import accumulating
from policy.quantized.array import CodeLayout, QuantizedArray, frozen


def bilinear_of_codes(
    operation: Callable[..., jax.Array],
    x: jax.Array,
    weight: QuantizedArray,
    *,
    accumulator_dtype: DTypeLike | None = None,
    is_whole: bool = True,
) -> jax.Array:
    """Returns ``operation(x, widened weight)``: the codes are read in the dtype of `x`.

    Args:
      operation: bilinear; takes `preferred_element_type` where an accumulator is asked for.
      x: floating.
      weight: the codes.
      accumulator_dtype: of the result; None leaves it to the operation.
      is_whole: whether the operation takes the array, or numbers in the shape of the codes.
    """
    run = operation if accumulator_dtype is None else accumulating(operation, accumulator_dtype)

    def multiplied(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        layout = dataclasses.replace(weight.layout, dtype=jnp.dtype(x.dtype))
        widened = layout.numbers(codes, scales)
        return run(x, widened.reshape(layout.shape(codes.shape)) if is_whole else widened)

    return jax.checkpoint(multiplied)(x, *frozen(weight))


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    *,
    accumulator_dtype: DTypeLike | None = None,
    **options: Any,
) -> jax.Array:
    """Computes `jax.lax.dot_general` of an array and codes, in the dtype of the array.

    Args:
      lhs, rhs: a floating array and a QuantizedArray, in either order.
      dimension_numbers: of the arrays.
      accumulator_dtype: of the result; None is that of the operands.
      **options: of `jax.lax.dot_general`.
    """
    if isinstance(lhs, QuantizedArray):
        return _with_weight_first(lhs, rhs, dimension_numbers, accumulator_dtype, options)
    x, weight = lhs, rhs
    (of_x, of_weight), (batch_x, batch_weight) = (
        (tuple(pair[0]), tuple(pair[1])) for pair in dimension_numbers
    )
    multiply = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, **options)
    axis, taken = weight.ndim + weight.layout.axis, (*of_weight, *batch_weight)
    if any(i in taken for i in range(axis + 1, weight.ndim)) or axis in batch_weight:
        return bilinear_of_codes(multiply, x, weight, accumulator_dtype=accumulator_dtype)
    wide = jax.ShapeDtypeStruct(weight.shape, x.dtype)
    plain = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
    shape, row = jax.eval_shape(plain, x, wide).shape, _row_to_repeat(x, of_x, batch_x)
    if row is not None:
        # XLA for TPUs computes a single row as a sum of products, not on the matrix unit.
        width = [(0, 7 if i == row else 0, 0) for i in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), width)
        row -= sum(i < row for i in of_x)
    x, (of_x, batch_x), kept = _of_blocks(x, weight, of_x, of_weight, batch_x)
    numbers = (of_x, kept), (batch_x, batch_weight)
    multiply = functools.partial(lax.dot_general, dimension_numbers=numbers, **options)
    y = bilinear_of_codes(multiply, x, weight, accumulator_dtype=accumulator_dtype, is_whole=False)
    if row is not None:
        y = lax.slice_in_dim(y, 0, 1, axis=row)
    return y.reshape(shape)


def _with_weight_first(
    weight: QuantizedArray,
    x: jax.Array,
    dimension_numbers: DimensionNumbers,
    accumulator_dtype: DTypeLike | None,
    options: dict[str, Any],
) -> jax.Array:
    """Computes `dot_general` of codes and an array: of the array and the codes, with the axes of
    the result in their places.
    """
    (of_weight, of_x), (batch_weight, batch_x) = dimension_numbers
    numbers = (of_x, of_weight), (batch_x, batch_weight)
    y = dot_general(x, weight, numbers, accumulator_dtype=accumulator_dtype, **options)
    batch, free = len(batch_x), x.ndim - len(of_x)
    return jnp.moveaxis(y, range(batch, free), range(batch - free, 0))


def _of_blocks(
    x: jax.Array,
    weight: QuantizedArray,
    of_x: tuple[int, ...],
    of_weight: tuple[int, ...],
    batch_x: tuple[int, ...],
) -> tuple[jax.Array, tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]:
    """Divides the axis of `x` that is contracted with the quantized one as that is divided.

    Returns:
      `x`; its contracted axes and its axes of the batch; and the contracted axes of the codes.
    """
    axis = weight.ndim + weight.layout.axis
    block = weight.format.block
    if block is None or axis not in of_weight:
        return x, (of_x, batch_x), of_weight
    place = of_weight.index(axis)
    at = of_x[place]
    # Otherwise XLA moves the reshape before the matmul that made `x`, whose own widening it then
    # computes apart.
    x = lax.optimization_barrier(x)
    x = x.reshape(*x.shape[:at], x.shape[at] // block, block, *x.shape[at + 1 :])

    def moved(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i + (i > at) for i in axes)

    def divided(axes: tuple[int, ...], i: int) -> tuple[int, ...]:
        return (*axes[:place], i, i + 1, *axes[place + 1 :])

    return x, (divided(moved(of_x), at), moved(batch_x)), divided(of_weight, axis)


def _row_to_repeat(x: jax.Array, contracted: Sequence[int], batch: Sequence[int]) -> int | None:
    """Returns the axis of a single row, of which a TPU is to compute eight; None otherwise."""
    free = [i for i in range(x.ndim) if i not in contracted]
    if batch or not free or math.prod(x.shape[i] for i in free) != 1 or backend()[0] != "tpu":
        return None
    return free[-1]


def rows(table: QuantizedArray, tokens: jax.Array) -> jax.Array:
    """Looks up rows of a table (tokens, features...), and widens those alone.

    Args:
      table: the codes.
      tokens: integers (...).
    """
    parts, layout = table.checked_parts(), table.layout

    def taken(array: jax.Array, index: jax.Array = tokens) -> jax.Array:
        return jnp.take(array, index, axis=0)

    if layout.axis != -table.ndim:
        found = QuantizedArray(taken(parts.codes), taken(parts.scales), layout)
        return layout.numbers(found.codes, found.scales).reshape(found.shape)
    scales, block = parts.scales[0], layout.format.block
    if block is None:
        codes, size = taken(parts.codes), table.shape[0]
        is_row = ((tokens >= -size) & (tokens < size)).reshape(
            *tokens.shape, *(1,) * (codes.ndim - tokens.ndim)
        )
        scales = jnp.where(is_row, jnp.broadcast_to(scales, codes.shape), jnp.nan)
    else:
        codes = parts.codes.at[tokens // block, tokens % block].get(mode="fill")
        scales = taken(scales, tokens // block)
    sizes = (1, *codes.shape[tokens.ndim :])
    row = CodeLayout(ParamFormat(layout.format.name), sizes, layout.dtype)
    codes, scales = (jnp.expand_dims(each, tokens.ndim) for each in (codes, scales))
    return row.numbers(codes, scales).reshape(*tokens.shape, *table.shape[1:])

"""Ragged matmuls in 8 bits: rows of tokens times the kernels of their experts.

As `policy.eight_bits.scaled_matmul`, with a scale for each row of the tokens and for each expert
and column of the kernels. The cotangent has one for each row where the gradient of the tokens is
computed, and one for each expert and column, of that expert's rows alone, where the kernels' is.

Rows that belong to no group may hold anything: no scale and no sum reads them. Their results and
their gradients are zeros, as those of `jax.lax.ragged_dot` on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from policy.core.arrays import alike_varying
from policy.core.dtypes import INT8, ScaledMatmul
from policy.core.quantization import Quantized, largest_magnitude
from policy.eight_bits.quantization import (
    ScaledOperation,
    in_8_bits,
    quantize,
    quantize_by,
    quantize_for,
    warn_if_emulated,
)
from policy.programs.dtypes import explicit_sharding


def _numbers(contracted: Any, groups: tuple[int, ...]) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((contracted, ((), ())), (0,), groups)


_FORWARD = _numbers(((1,), (1,)), (0,))  # (T, K) x (E, K, N) -> (T, N)
_OF_ROWS = _numbers(((1,), (2,)), (0,))  # (T, N) x (E, K, N) -> (T, K)
_OF_KERNELS = _numbers(((0,), (0,)), ())  # (T, K) x (T, N) -> (E, K, N)


_SELECTED = 16  # experts


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sizes"],
    meta_fields=["by", "weight", "gradients", "dtype", "rows"],
)
@dataclasses.dataclass(frozen=True)
class _Ragged(ScaledOperation):
    """A ragged matmul of rows, (T, K), and kernels, (E, K, N): T tokens, E experts.

    Attributes:
      dtype: that the result is rounded to.
      rows: T.
      sizes: the rows of each expert, (E,).
    """

    dtype: np.dtype
    rows: int
    sizes: Array

    def product(self, lhs: Array, rhs: Array) -> Array:
        return _masked(self._dot(lhs, rhs, _FORWARD, self.dtype), self.sizes)

    def beside_result(self, scale: Array, side: int) -> Array:
        return self._of_rows(lax.squeeze(scale, (1,))) if side else scale

    def summed_for(self, side: int) -> tuple[int, ...]:
        return (1 - side,)

    def quantized(self, side: int, cotangent: Array) -> Quantized:
        cotangent = _masked(cotangent, self.sizes)
        if side == 0:
            return super().quantized(side, cotangent)
        if self.by.scaling == "tensor":
            coded = super().quantized(side, cotangent)
        else:
            largest = largest_magnitude(cotangent, self._largest_of_experts)
            coded = quantize_by(cotangent, largest, self.gradients, self._of_rows)
        return Quantized(coded.qvalue, lax.expand_dims(coded.scale, (1,)))

    def gradient(
        self, side: int, cotangent: Array, other: Array, scale: Array | None, dtype: DTypeLike
    ) -> Array:
        operands = (other, cotangent) if side else (cotangent, other)
        product = self._dot(*operands, _OF_KERNELS if side else _OF_ROWS, dtype)
        product = product if scale is None else product * scale
        return product if side else _masked(product, self.sizes)

    def _dot(
        self, lhs: Array, rhs: Array, numbers: lax.RaggedDotDimensionNumbers, dtype: DTypeLike
    ) -> Array:
        def multiply(lhs: Array, rhs: Array, **options: Any) -> Array:
            if lhs.dtype == INT8:  # exact, and TPUs' kernel has it at the default precision alone
                options["precision"] = None
            return lax.ragged_dot_general(lhs, rhs, self.sizes, numbers, **options)

        return self.multiplied(multiply, lhs, rhs, dtype)

    def _of_rows(self, scales: Array) -> Array:
        """Returns the scales of rows, (T, N), from those of their experts, (E, N)."""
        if self.by.scaling == "tensor":
            return scales
        return _taken(scales, _experts(self.sizes, self.rows)[:, None])

    def _largest_of_experts(self, bits: Array) -> Array:
        """Returns the largest of integers that are not negative, (E, N), from rows, (T, N)."""
        experts = _experts(self.sizes, self.rows)
        found = jax.ops.segment_max(bits, experts, self.sizes.size, indices_are_sorted=True)
        return jnp.maximum(found, 0)  # of an expert without rows


def scaled_ragged_dot_general(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    numbers: lax.RaggedDotDimensionNumbers,
    by: ScaledMatmul,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """Multiplies rows by the kernels of their groups in 8 bits, and returns the accumulator,
    rescaled.

    Backward multiplies in 8 bits too. Its residuals are the codes and the scales of the operands.
    Gradients have the dtypes of the operands.

    Args:
      lhs: floating rows, one axis of which is ragged and all others contracted.
      rhs: floating kernels, the weight, with an axis of groups.
      group_sizes: integers, (E,).
      numbers: as of `jax.lax.ragged_dot_general`, of a matmul that `ragged_may_run_in_8_bits`.
      by: the dtypes and scales.
      dtype: of the result, which is rounded to it once.

    Returns:
      (T, ...) with the free axes of `rhs`. Rows that belong to no group are zeros.

    Raises:
      NotImplementedError: the gradient is differentiated again, or forward mode is evaluated.
    """
    warn_if_emulated(by)
    group_sizes = group_sizes.astype(jnp.int32)
    (left, right), _ = numbers.dot_dimension_numbers
    (group,) = numbers.rhs_group_dimensions
    free = [axis for axis in range(rhs.ndim) if axis != group and axis not in right]
    shape = [rhs.shape[axis] for axis in free]
    tokens, experts = lhs.shape[numbers.lhs_ragged_dimensions[0]], rhs.shape[group]
    lhs = jnp.transpose(lhs, (*numbers.lhs_ragged_dimensions, *left)).reshape(tokens, -1)
    rhs = jnp.transpose(rhs, (group, *right, *free)).reshape(experts, lhs.shape[1], -1)
    # The barrier keeps the codes: XLA for TPUs would quantize the kernels in backward once more, in
    # its own order of axes.
    codes = (
        quantize(_masked(lax.stop_gradient(lhs), group_sizes), (1,), by.operands, by.scaling),
        lax.optimization_barrier(quantize_for(rhs, (1,), by)),
    )
    ragged = _Ragged(by, 1, by.gradients, jnp.dtype(dtype), tokens, group_sizes)
    lhs, rhs = alike_varying(lhs, rhs)
    result = in_8_bits(ragged, lhs, rhs, codes)
    return result.astype(dtype).reshape(tokens, *shape)


def ragged_may_run_in_8_bits(
    lhs: Array, rhs: Array, group_sizes: Array, params: Mapping[str, Any]
) -> bool:
    """Returns whether `scaled_ragged_dot_general` takes a ragged matmul: one whose groups are of
    rows, without axes of a batch and, on a mesh, without explicit axes.

    Args:
      params: of the primitive.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    is_of_rows = len(numbers.rhs_group_dimensions) == 1 and lhs.ndim == 1 + len(contracted)
    is_placed = params["out_sharding"] is not None or any(
        map(explicit_sharding, map(jax.typeof, (lhs, rhs)))
    )
    is_plain = params["group_offset"] is None and group_sizes.ndim == 1 and not batch
    return is_of_rows and is_plain and not is_placed


def _masked(rows: Array, sizes: Array) -> Array:
    """Returns rows with zeros for those that belong to no group."""
    is_read = jnp.arange(rows.shape[0], dtype=sizes.dtype) < jnp.sum(sizes)
    return jnp.where(is_read[:, None], rows, 0)


def _taken(scales: Array, experts: Array) -> Array:
    """Returns the row of `scales`, (E, N), of each expert, (T, 1), or ones if there is no such row.

    XLA fuses selections into what reads them, and not a gather, which writes (T, N) to memory. As
    many as these experts have cost less than that.
    """
    count = scales.shape[0]
    if count > _SELECTED:
        return jnp.take(scales, experts[:, 0], axis=0, mode="fill", fill_value=1)
    rows = [scales[i : i + 1] for i in range(count)]
    for bit in range((count - 1).bit_length()):
        is_set = experts & (1 << bit) != 0
        rows += rows[len(rows) - 1 :] * (len(rows) % 2)
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [jnp.where(is_set, high, low) for low, high in pairs]
    return jnp.where(experts < count, rows[0], 1)


def _experts(sizes: Array, rows: int) -> Array:
    """Returns the expert of each row; their number for rows that belong to none."""
    is_after = jnp.arange(rows, dtype=sizes.dtype)[:, None] >= jnp.cumsum(sizes)[None]
    return jnp.sum(is_after, axis=1, dtype=sizes.dtype)

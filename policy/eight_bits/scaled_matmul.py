"""Matrix multiplications in 8 bits, with scales that are computed from the operands at hand."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from policy.core.arrays import alike_varying
from policy.core.dtypes import ScaledMatmul
from policy.core.einsums import DimensionNumbers
from policy.core.quantization import Quantized
from policy.eight_bits.blocks import BlockAxes, multiply_blocks, quantize_in_blocks
from policy.eight_bits.quantization import (
    ScaledOperation,
    in_8_bits,
    quantize_for,
    shared,
    warn_if_emulated,
)
from policy.programs.dtypes import explicit_sharding

_Pair = tuple[tuple[int, ...], tuple[int, ...]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Matmul(ScaledOperation):
    """A matmul: results have the axes of the batch, then the left's, then the right's.

    Attributes:
      contracted, batch, free: axes of the left operand and of the right one.
      dtype: that the result is rounded to.
    """

    contracted: _Pair
    batch: _Pair
    free: _Pair
    dtype: np.dtype

    def product(self, lhs: Array, rhs: Array) -> Array:
        return self._dot(lhs, rhs, (self.contracted, self.batch), self.dtype)

    def beside_result(self, scale: Array, side: int) -> Array:
        kept = (*self.batch[side], *self.free[side])
        rows = lax.squeeze(
            jnp.transpose(scale, (*kept, *self.contracted[side])),
            tuple(range(len(kept), scale.ndim)),
        )
        return lax.expand_dims(rows, self._of_result(1 - side))

    def summed_for(self, side: int) -> tuple[int, ...]:
        return self._of_result(1 - side)

    def gradient(
        self, side: int, cotangent: Array, other: Array, scale: Array | None, dtype: DTypeLike
    ) -> Array:
        numbers, axes = self._transposed(side)
        product = self._dot(cotangent, other, numbers, dtype)
        if scale is not None:
            rows = lax.squeeze(scale, self.summed_for(side))
            product = product * lax.expand_dims(rows, range(rows.ndim, product.ndim))
        return jnp.transpose(product, [axes.index(place) for place in range(len(axes))])

    def _dot(self, lhs: Array, rhs: Array, numbers: DimensionNumbers, dtype: DTypeLike) -> Array:
        multiply = functools.partial(lax.dot_general, dimension_numbers=numbers)
        return self.multiplied(multiply, lhs, rhs, dtype)

    def _of_result(self, side: int) -> tuple[int, ...]:
        """Returns the axes of the result that are an operand's own."""
        start = len(self.batch[0]) + (len(self.free[0]) if side else 0)
        return tuple(range(start, start + len(self.free[side])))

    def _transposed(self, side: int) -> tuple[DimensionNumbers, tuple[int, ...]]:
        """Returns the dimension numbers of an operand's gradient, and the axes of their result.

        The gradient of an operand contracts the cotangent, at the left, and the other operand. The
        axes are those of the operand, in another order.
        """
        other = 1 - side
        batch = tuple(range(len(self.batch[0])))
        numbers = ((self._of_result(other), self.free[other]), (batch, self.batch[other]))
        # The other operand's contracted axes follow, in its order, not in the pairs' order.
        pairs = sorted(zip(self.contracted[other], self.contracted[side], strict=True))
        return numbers, (*self.batch[side], *self.free[side], *(axis for _, axis in pairs))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _BlockMatmul(_Matmul):
    """A matmul of operands with a scale for each block.

    Both matmuls of backward contract other axes than forward: their operands are quantized along
    these, from the numbers that forward quantized.

    Attributes:
      shapes: of both operands.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    def layout(self, side: int) -> BlockAxes:
        """Returns the axes of an operand, forward."""
        return self.batch[side], self.free[side], self.contracted[side]

    def saved_layout(self, side: int) -> BlockAxes:
        """Returns the axes of an operand in the other one's gradient."""
        return self.batch[side], tuple(sorted(self.contracted[side])), self.free[side]

    def coded(self, x: Array, layout: BlockAxes) -> Quantized:
        return shared(quantize_in_blocks, x, layout, self.by.operands, self.by.blocks)

    def of_codes(self, lhs: Quantized, rhs: Quantized) -> Array:
        left, right = self.shapes
        kept = [left[axis] for axis in (*self.batch[0], *self.free[0])]
        product = multiply_blocks(lhs, rhs, self.dtype)
        return jnp.reshape(product, (*kept, *(right[axis] for axis in self.free[1])))

    def gradient_of_codes(
        self, side: int, cotangent: Array, other: Quantized, dtype: DTypeLike
    ) -> Array:
        batch, other_side = tuple(range(len(self.batch[0]))), 1 - side
        layout = batch, self._of_result(side), self._of_result(other_side)
        blocks: Any = self.by.blocks
        given = quantize_in_blocks(cotangent, layout, self.gradients, blocks)
        _, axes = self._transposed(side)
        product = multiply_blocks(given, other, dtype)
        product = jnp.reshape(product, [self.shapes[side][axis] for axis in axes])
        return jnp.transpose(product, [axes.index(place) for place in range(len(axes))])


def scaled_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    by: ScaledMatmul,
    *,
    weight: Literal["lhs", "rhs"] = "rhs",
    dtype: DTypeLike = jnp.float32,
    out_sharding: Any = None,
) -> Array:
    """Multiplies two operands in 8 bits, and returns the accumulator, rescaled.

    Backward multiplies in 8 bits too. Its residuals are the codes and the scales of the operands.
    The scale of an operand that was contracted differently then is folded into the cotangent. In a
    format with blocks the residuals are codes and scales along what backward contracts.
    Gradients have the dtypes of the operands.

    Args:
      lhs, rhs: floating arrays.
      dimension_numbers: as of `jax.lax.dot_general`.
      by: the dtypes and scales.
      weight: the operand whose gradient `by.weight_gradient` is about.
      dtype: of the result, which is rounded to it once.
      out_sharding: of the result, as in `jax.lax.dot_general`.

    Raises:
      NotImplementedError: the gradient is differentiated again, or forward mode is evaluated.
    """
    warn_if_emulated(by)
    contracted, batch = ((tuple(pair[0]), tuple(pair[1])) for pair in dimension_numbers)
    lhs_free, rhs_free = (
        tuple(i for i in range(x.ndim) if i not in (*contracted[side], *batch[side]))
        for side, x in enumerate((lhs, rhs))
    )
    fields: dict[str, Any] = {
        "by": by,
        "weight": int(weight == "rhs"),
        "gradients": by.gradients,
        "contracted": contracted,
        "batch": batch,
        "free": (lhs_free, rhs_free),
        "dtype": jnp.dtype(dtype),
    }
    plain = functools.partial(
        lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding
    )
    multiply: Any
    if by.blocks is not None:
        matmul = _BlockMatmul(**fields, shapes=(lhs.shape, rhs.shape))
        multiply, operands = functools.partial(_multiplied_in_blocks, matmul), (lhs, rhs)
    else:
        codes = quantize_for(lhs, contracted[0], by), quantize_for(rhs, contracted[1], by)
        multiply = functools.partial(in_8_bits, _Matmul(**fields))
        operands = (*alike_varying(lhs, rhs), codes)
    if out_sharding is not None or any(explicit_sharding(jax.typeof(x)) for x in (lhs, rhs)):
        # XLA places what is inside, where blocks merge axes that several shardings may divide.
        placed: Any = jax.eval_shape(plain, lhs, rhs).sharding
        axes = placed.mesh.explicit_axes
        multiply = jax.sharding.auto_axes(multiply, axes=axes, out_sharding=placed)
    return multiply(*operands).astype(dtype)


def _multiplied_in_blocks(matmul: _BlockMatmul, lhs: Array, rhs: Array) -> Array:
    left, right = alike_varying(lhs, rhs)
    codes, saved = (
        (matmul.coded(lhs, layout(0)), matmul.coded(rhs, layout(1)))
        for layout in (matmul.layout, matmul.saved_layout)
    )
    return in_8_bits(matmul, left, right, codes, saved=saved)

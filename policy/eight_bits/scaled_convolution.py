"""Convolutions in 8 bits, with scales that are computed from the operands at hand.

As `policy.eight_bits.scaled_matmul`, by other rows: an input has a scale for each example, a kernel
one for each output feature, and a cotangent one for each example where the input's gradient is
computed, and for each output feature where the kernel's is. XLA convolves no two dtypes of float8:
cotangents are quantized to the operands' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from policy.core.arrays import alike_varying
from policy.core.dtypes import INT8, ScaledMatmul, backend
from policy.eight_bits.quantization import (
    ScaledOperation,
    in_8_bits,
    quantize_for,
    warn_if_emulated,
)
from policy.programs.dtypes import explicit_sharding
from policy.programs.jaxprs import Equation, bind, opened
from policy.programs.rewriting.interpreter import Interpreter

OPTIONS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation"),
    *("dimension_numbers", "feature_group_count"),
)
"""The options of `scaled_conv`, which are parameters of JAX's primitive too."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Convolution(ScaledOperation):
    """A convolution.

    Attributes:
      options: those of `OPTIONS`, as of `jax.lax.conv_general_dilated`.
      shapes: of both operands.
    """

    options: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def axes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The axes that have scales: an input's of examples, and a kernel's of outputs; and those
        of the result.
        """
        numbers = dict(self.options)["dimension_numbers"]
        return (numbers.lhs_spec[0], numbers.rhs_spec[0]), numbers.out_spec[:2]

    def __call__(self, lhs: Array, rhs: Array, dtype: DTypeLike | None = None) -> Array:
        return lax.conv_general_dilated(
            lhs, rhs, **dict(self.options), preferred_element_type=dtype
        )

    def product(self, lhs: Array, rhs: Array) -> Array:
        return _accumulated(self, lhs, rhs)

    def beside_result(self, scale: Array, side: int) -> Array:
        operands, result = self.axes
        return jnp.moveaxis(scale, operands[side], result[side])

    def summed_for(self, side: int) -> tuple[int, ...]:
        _, result = self.axes
        return _all_but(result[side], len(self.shapes[0]))

    def gradient(
        self, side: int, cotangent: Array, other: Array, scale: Array | None, dtype: DTypeLike
    ) -> Array:
        body, consts = opened(_transposition(self, side, cotangent.shape))

        def convolve(cotangent: Array, other: Array, dtype: DTypeLike) -> Array:
            (result,) = _Transposition(dtype).run(body, consts, [cotangent, other])
            return result

        gradient = _accumulated(convolve, cotangent, other)
        if scale is None:
            return gradient
        operands, result = self.axes
        return gradient * jnp.moveaxis(scale, result[side], operands[side])


def scaled_conv(
    lhs: Array, rhs: Array, by: ScaledMatmul, *, dimension_numbers: Any = None, **options: Any
) -> Array:
    """Convolves an input with a kernel in 8 bits, and returns the float32 accumulator, rescaled.

    Backward convolves in 8 bits too. Its residuals are the codes and the scales of the operands.
    Gradients have the dtypes of the operands.

    Args:
      lhs: the input, floating.
      rhs: the kernel, floating.
      by: the dtypes and scales; "row" gives a scale to each example and to each output feature.
      dimension_numbers: as of `jax.lax.conv_general_dilated`.
      **options: others of `OPTIONS`, as of `jax.lax.conv_general_dilated`.

    Raises:
      NotImplementedError: the gradient is differentiated again, or forward mode is evaluated.
    """
    warn_if_emulated(by, "convolutions")
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    fixed = {name: _hashable(value) for name, value in options.items()}
    fixed["dimension_numbers"] = numbers
    lhs, rhs = alike_varying(lhs, rhs)
    convolution = _Convolution(by, 1, by.operands, tuple(fixed.items()), (lhs.shape, rhs.shape))
    of_input, of_kernel = convolution.axes[0]
    x = quantize_for(lhs, _all_but(of_input, lhs.ndim), by)
    kernel = quantize_for(rhs, _all_but(of_kernel, rhs.ndim), by)
    return in_8_bits(convolution, lhs, rhs, (x, kernel))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def may_run_in_8_bits(
    lhs: Array, rhs: Array, by: ScaledMatmul, batch_group_count: int = 1, out_sharding: Any = None
) -> bool:
    """Returns whether `scaled_conv` takes a convolution.

    Not one of groups of examples, none in a format with blocks, and none on a mesh of explicit
    axes.
    """
    is_placed = out_sharding is not None or any(map(explicit_sharding, map(jax.typeof, (lhs, rhs))))
    return batch_group_count == 1 and by.blocks is None and not is_placed


def _accumulated(convolve: Callable[..., Array], left: Array, right: Array) -> Array:
    """Returns the float32 result of a convolution of codes, or of halves.

    Args:
      convolve: of two arrays, and the dtype of its result.
    """
    if left.dtype != INT8:
        return convolve(left, right, jnp.float32)
    if backend()[0] in ("gpu", "cuda", "rocm"):
        # cuDNN has no convolution of int8 that returns its accumulator, or that is a gradient.
        return convolve(left.astype(jnp.float32), right.astype(jnp.float32), jnp.float32)
    return convolve(left, right, jnp.int32).astype(jnp.float32)


def _all_but(axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i != axis)


@functools.lru_cache(maxsize=256)
def _transposition(convolution: _Convolution, side: int, result: tuple[int, ...]) -> Any:
    """Returns the program of an operand's gradient from a cotangent and the other operand.

    JAX's own transposition, traced in float32, says which convolution that is.
    """
    shapes = convolution.shapes

    def transposition(cotangent: Array, other: Array) -> Array:
        def of(operand: Array) -> Array:
            return convolution(*((operand, other) if side == 0 else (other, operand)))

        operand = jax.ShapeDtypeStruct(shapes[side], jnp.float32)
        (gradient,) = jax.linear_transpose(of, operand)(cotangent)
        return gradient

    as_traced = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (result, shapes[1 - side])]
    return jax.make_jaxpr(transposition)(*as_traced)


class _Transposition(Interpreter[Any]):
    """Evaluates a transposed convolution on arrays in other dtypes than it was traced with.

    Args:
      dtype: of its result.
    """

    def __init__(self, dtype: DTypeLike):
        super().__init__()
        self._dtype = jnp.dtype(dtype)

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        is_convolution = equation.primitive.name == "conv_general_dilated"
        given = {"preferred_element_type": self._dtype} if is_convolution else {}
        return bind(equation, values, equation.params | given)

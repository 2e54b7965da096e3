"""Convolutions in 8 bits, with scales that are computed from the operands at hand.

As `policy.eight_bits.scaled_matmul`, by other rows: an input has a scale for each example, a kernel
one for each output feature, and a cotangent one for each example where the input's gradient is
computed, and for each output feature where the kernel's is. XLA convolves no two dtypes of float8:
cotangents are quantised to the operands' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.core.mapped_axes import alike_varying
from policy.core.matmul_dtypes import INT8, ScaledMatmul, backend
from policy.eight_bits.once_differentiable import differentiated_once, mark
from policy.eight_bits.quantisation import Quantised, quantise, rescaled, warn_if_emulated
from policy.programs.dtypes import explicit_sharding
from policy.programs.jaxprs import Equation, bind, opened
from policy.programs.rewriting.interpreter import Interpreter

OPTIONS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
)
"""The options of `scaled_conv`, which are parameters of JAX's primitive too."""


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """A convolution but for its operands.

    Attributes:
      options: those of `OPTIONS`, as of `jax.lax.conv_general_dilated`.
      by: the dtypes and scales.
    """

    options: tuple[tuple[str, Any], ...]
    by: ScaledMatmul

    @property
    def axes(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """The axes of input, kernel and result: those of examples or outputs, then of features."""
        numbers = dict(self.options)["dimension_numbers"]
        return numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec

    def __call__(self, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        return lax.conv_general_dilated(
            lhs, rhs, **dict(self.options), preferred_element_type=dtype
        )


def scaled_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    by: ScaledMatmul,
    *,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
) -> jax.Array:
    """Convolves an input with a kernel in 8 bits, and returns the float32 accumulator, rescaled.

    Backward convolves in 8 bits too. Its residuals are the codes and the scales of the operands.
    Gradients have the dtypes of the operands.

    Args:
      lhs: the input, floating.
      rhs: the kernel, floating.
      by: the dtypes and scales; "row" gives a scale to each example and to each output feature.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count:
        as of `jax.lax.conv_general_dilated`.

    Raises:
      NotImplementedError: the gradient is differentiated again.
    """
    warn_if_emulated(by, "convolutions")
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    options = {
        "window_strides": tuple(window_strides),
        "padding": padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        "lhs_dilation": None if lhs_dilation is None else tuple(lhs_dilation),
        "rhs_dilation": None if rhs_dilation is None else tuple(rhs_dilation),
        "dimension_numbers": numbers,
        "feature_group_count": feature_group_count,
    }
    convolution = _Convolution(tuple(options.items()), by)
    lhs, rhs = alike_varying(lhs, rhs)
    codes = [
        quantise(lax.stop_gradient(x), _all_but(spec[0], x.ndim), by.operands, by.scaling)
        for x, spec in zip((lhs, rhs), convolution.axes, strict=False)
    ]
    return _conv(convolution, lhs, rhs, *codes)


def may_run_in_8_bits(
    lhs: jax.Array, rhs: jax.Array, batch_group_count: int = 1, out_sharding: Any = None
) -> bool:
    """Returns whether `scaled_conv` takes a convolution.

    Not one of groups of examples, and none on a mesh of explicit axes.
    """
    is_placed = out_sharding is not None or any(map(explicit_sharding, map(jax.typeof, (lhs, rhs))))
    return batch_group_count == 1 and not is_placed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(
    convolution: _Convolution,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_codes: Quantised,
    rhs_codes: Quantised,
) -> jax.Array:
    del lhs, rhs
    product = _product(convolution, lhs_codes.codes, rhs_codes.codes)
    scales = _of_examples(convolution, lhs_codes), _of_features(convolution, rhs_codes)
    return rescaled(product, *scales)


def _forward(
    convolution: _Convolution,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_codes: Quantised,
    rhs_codes: Quantised,
) -> tuple[jax.Array, Any]:
    keeps_input = convolution.by.weight_gradient == "compute"
    saved = (lhs_codes, rhs_codes), lhs if keeps_input else None, (mark(lhs), mark(rhs))
    return _conv(convolution, lhs, rhs, lhs_codes, rhs_codes), saved


def _backward(convolution: _Convolution, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    (lhs, rhs), given, (lhs_mark, rhs_mark) = saved
    cotangent = differentiated_once(cotangent, lhs_mark, rhs_mark)
    by, (lhs_spec, rhs_spec, out_spec) = convolution.by, convolution.axes
    transposed = functools.partial(_transposed, convolution, lhs.codes.shape, rhs.codes.shape)

    folded = cotangent * _of_features(convolution, rhs)
    codes = quantise(folded, _all_but(out_spec[0], folded.ndim), by.operands, by.scaling)
    by_input = transposed(0, codes.codes, rhs.codes) * _along(codes, lhs_spec[0], lhs_spec[0])

    if given is not None:
        by_kernel = transposed(1, cotangent.astype(given.dtype), given)
    else:
        folded = cotangent * _of_examples(convolution, lhs)
        codes = quantise(folded, _all_but(out_spec[1], folded.ndim), by.operands, by.scaling)
        by_kernel = transposed(1, codes.codes, lhs.codes) * _along(codes, out_spec[1], rhs_spec[0])
    return by_input.astype(lhs_mark.dtype), by_kernel.astype(rhs_mark.dtype), None, None


_conv.defvjp(_forward, _backward)


def _product(convolve: Callable[..., jax.Array], left: jax.Array, right: jax.Array) -> jax.Array:
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


def _along(operand: Quantised, source: int, axis: int) -> jax.Array:
    """Returns the scales of an operand, which stand along one of its axes, along another axis."""
    return jnp.moveaxis(operand.scale, source, axis)


def _of_examples(convolution: _Convolution, operand: Quantised) -> jax.Array:
    """Returns the scales of an input in a shape that broadcasts with the result."""
    lhs_spec, _, out_spec = convolution.axes
    return _along(operand, lhs_spec[0], out_spec[0])


def _of_features(convolution: _Convolution, operand: Quantised) -> jax.Array:
    """Returns the scales of a kernel in a shape that broadcasts with the result."""
    _, rhs_spec, out_spec = convolution.axes
    return _along(operand, rhs_spec[0], out_spec[1])


# --------------------------------------------------------------------------------------------------
# Gradients
# --------------------------------------------------------------------------------------------------


def _transposed(
    convolution: _Convolution,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    side: int,
    cotangent: jax.Array,
    other: jax.Array,
) -> jax.Array:
    """Returns the float32 gradient of an operand, from a cotangent and the other operand.

    JAX's own transposition, traced in float32, says which convolution that is.
    """
    shapes = (lhs_shape, rhs_shape)
    body, consts = opened(_transposition(convolution, shapes, side, cotangent.shape))

    def convolve(cotangent: jax.Array, other: jax.Array, dtype: DTypeLike) -> jax.Array:
        (result,) = _Transposition(dtype).run(body, consts, [cotangent, other])
        return result

    return _product(convolve, cotangent, other)


@functools.lru_cache(maxsize=256)
def _transposition(
    convolution: _Convolution,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    side: int,
    result: tuple[int, ...],
) -> Any:
    def transposition(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        def of(operand: jax.Array) -> jax.Array:
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

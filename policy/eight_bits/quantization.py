"""Arrays in 8 bits with float32 scales, and operations of two of them that differentiate.

Nothing is stored between calls: an operand is divided by a scale that takes its largest magnitude
to the largest number of the 8-bit dtype, cast, multiplied by the 8-bit units of an accelerator into
a float32 or int32 accumulator, and the product is multiplied by the scales of both.

Formats and scaling by row are those of Micikevicius et al., "FP8 formats for deep learning"
(arXiv:2209.05433), and of torchao's float8 training recipes; scales that are powers of two are
those of the row-wise recipe there. Formats with blocks are in `policy.eight_bits.blocks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from policy.core.dtypes import INT8, ScaledMatmul, Scaling, backend, compute_capability, preferred
from policy.core.messages import warn_once
from policy.core.quantization import Quantized, codec_of, largest_magnitude
from policy.core.reverse_mode import in_reverse_mode
from policy.programs.thread import during, thread

_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite

# --------------------------------------------------------------------------------------------------
# Arrays in 8 bits
# --------------------------------------------------------------------------------------------------


def warn_if_emulated(
    by: ScaledMatmul, operation: Literal["matmuls", "convolutions"] = "matmuls"
) -> None:
    """Warns once if the backend has no 8-bit operation of this kind: it emulates one, slower.

    The numbers are the same. The backend is that of `policy.core.dtypes.backend`.
    """
    platform, kind = backend()
    multiplied = str(by.operands) if by.blocks is None else by.scaling
    if by.blocks is not None:
        has_it = platform in ("gpu", "cuda") and compute_capability(kind) >= (10, 0)
    else:
        has_it = preferred(platform, kind) == ("i8" if by.operands == INT8 else "f8")
        # GPUs from Turing on, and newer TPUs, multiply int8 too, though not faster than float8.
        has_it = has_it or (by.operands == INT8 and platform != "cpu")
    if not has_it or (operation == "convolutions" and platform != "tpu"):
        name = f"a GPU of compute capability {kind}" if kind[:1].isdigit() else kind
        way_out = {
            "matmuls": "m=8bit uses 8 bits only where the backend has them.",
            "convolutions": "A rule for the class of the layers excludes them.",
        }
        warn_once(
            f"{name} has no {multiplied} {operation}, so they are emulated: the results are the "
            f"same, but they run slower than in compute_dtype. {way_out[operation]}"
        )


def quantize(
    x: Array,
    axes: Sequence[int],
    dtype: np.dtype,
    scaling: Scaling = "row",
    scale_dtype: DTypeLike = jnp.float32,
) -> Quantized:
    """Returns an array in 8 bits.

    The scale is at least 2**-126, a power of two for float8, so that scaling is exact, and the
    quotient of the largest magnitude and 127 for int8. It is NaN where a number is not finite.
    It is rounded up to `scale_dtype` before the array is divided by it.

    Args:
      x: floating.
      axes: the axes that are contracted, which share a scale by "row".
      dtype: of the codes.
      scaling: "row", or "tensor" for one scale.
      scale_dtype: float32 or bfloat16.
    """
    shared = tuple(range(x.ndim)) if scaling == "tensor" else tuple(axes)
    wide = x.astype(jnp.float32)
    largest = functools.partial(jnp.max, axis=shared, keepdims=True, initial=0)
    return quantize_by(wide, largest_magnitude(wide, largest), dtype, scale_dtype=scale_dtype)


def quantize_by(
    wide: Array,
    largest: Array,
    dtype: np.dtype,
    beside: Callable[[Array], Array] = lambda scale: scale,
    scale_dtype: DTypeLike = jnp.float32,
) -> Quantized:
    """Returns a float32 array in 8 bits, as `quantize`.

    Args:
      wide: the array.
      largest: the largest magnitudes of the numbers that share a scale.
      dtype: of the codes.
      beside: brings scales, shaped as `largest`, to a shape that broadcasts with `wide`.
      scale_dtype: float32 or bfloat16.
    """
    is_exact = dtype != INT8  # scales of float8 are powers of two
    codec = codec_of(dtype)
    dropped = 23 if is_exact else 23 - int(jnp.finfo(scale_dtype).nmant)
    scale = jnp.maximum(rounded_up(largest / codec.highest, dropped), _SMALLEST_SCALE)
    values = codec.nearest(wide / beside(scale))
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    return Quantized(values, scale.astype(scale_dtype))


def shared_operands() -> contextlib.AbstractContextManager[None]:
    """Quantizes an operand of several matmuls once in a block, as attention's projections have it.

    Its codes and scales are one set of residuals.
    """
    return during(shared_operands={})


def quantize_for(x: Array, contracted: tuple[int, ...], by: ScaledMatmul) -> Quantized:
    """Returns an operand in 8 bits, as a constant of differentiation.

    Inside `shared_operands`, operations on the same operand share it.
    """
    return shared(quantize, x, contracted, by.operands, by.scaling)


def shared(make: Callable[..., Quantized], x: Array, *how: Any) -> Quantized:
    """Returns ``make(x, *how)`` as a constant of differentiation, once inside `shared_operands`."""
    known: dict[Any, Any] | None = thread.shared_operands
    key = (id(x), make, *how)
    # What a checkpoint inside the block computes is its own.
    trace = get_opaque_trace_state(convention="flax")
    _, where, codes = (known or {}).get(key, (None, None, None))
    if codes is not None and where == trace:
        return codes
    made = make(lax.stop_gradient(x), *how)
    if known is not None and codes is None:
        known[key] = x, trace, made  # the operand itself, so that no other array gets its identity
    return made


def rounded_up(x: Array, dropped: int) -> Array:
    """Rounds positive float32 numbers up so that the last `dropped` of 23 bits of their mantissas
    are 0: with 23, to powers of two, of normal numbers exactly.
    """
    if not dropped:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    mantissa = np.uint32(2**dropped - 1)
    return lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)


# --------------------------------------------------------------------------------------------------
# Operations, and their derivatives
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScaledOperation:
    """A bilinear operation in 8 bits but for its operands: a pytree of the arrays it depends on.

    Attributes:
      by: the dtypes and scales.
      weight: the operand that is the weight: 0 is the left one.
      gradients: the dtype of cotangents in 8 bits.
    """

    by: ScaledMatmul
    weight: int
    gradients: np.dtype

    def of_codes(self, lhs: Quantized, rhs: Quantized) -> Array:
        """Returns the float32 result of two operands."""
        product = self.product(lhs.qvalue, rhs.qvalue)
        scales = [self.beside_result(x.scale, side) for side, x in enumerate((lhs, rhs))]
        return rescaled(product, *scales)

    def gradient_of_codes(
        self, side: int, cotangent: Array, other: Quantized, dtype: DTypeLike
    ) -> Array:
        """Returns the gradient of an operand, to be rounded to `dtype`, from the other one.

        The other's scale, which is along other axes here, is folded into the cotangent.
        """
        coded = self.quantized(side, cotangent * self.beside_result(other.scale, 1 - side))
        return self.gradient(side, coded.qvalue, other.qvalue, coded.scale, dtype)

    def product(self, lhs: Array, rhs: Array) -> Array:
        """Returns the float32 product of codes and codes, in units of both scales."""
        raise NotImplementedError

    def beside_result(self, scale: Array, side: int) -> Array:
        """Returns the scale of an operand in a shape that broadcasts with the result."""
        raise NotImplementedError

    def summed_for(self, side: int) -> tuple[int, ...]:
        """Returns the axes of the result that the gradient of an operand sums over."""
        raise NotImplementedError

    def quantized(self, side: int, cotangent: Array) -> Quantized:
        """Returns a float32 cotangent as the gradient of an operand multiplies it."""
        return quantize(cotangent, self.summed_for(side), self.gradients, self.by.scaling)

    def gradient(
        self, side: int, cotangent: Array, other: Array, scale: Array | None, dtype: DTypeLike
    ) -> Array:
        """Returns the gradient of an operand, to be rounded to `dtype`, from the other one.

        Both arrays are quantized values where there is a scale of the cotangent, else in
        compute_dtype.
        """
        raise NotImplementedError

    def multiplied(
        self, multiply: Callable[..., Array], lhs: Array, rhs: Array, dtype: DTypeLike
    ) -> Array:
        """Returns the product of two operands; of quantized values in float32, before it is scaled.

        Args:
          multiply: a matmul that takes `precision` and `preferred_element_type`.
          dtype: that the product is rounded to once it is scaled. Scales of float8 are powers of
            two: in bfloat16, whose range is that of float32, the matmul itself may round, so that
            devices that add up parts of a product exchange bfloat16.
        """
        if lhs.dtype.itemsize > 1:
            out = dtype if dtype == lhs.dtype else jnp.float32
            return multiply(lhs, rhs, preferred_element_type=out)
        wide = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
        # Hopper's tensor cores keep about 14 bits of a sum otherwise (cuBLASLt's CUBLASLT_
        # MATMUL_DESC_FAST_ACCUM, which XLA sets by the precision).
        precision = None if self.by.fast_accumulation else lax.Precision.HIGHEST
        accumulator = jnp.int32 if lhs.dtype == INT8 else wide
        product = multiply(lhs, rhs, precision=precision, preferred_element_type=accumulator)
        return product.astype(jnp.float32)


def rescaled(product: Array, scale: Array, other: Array) -> Array:
    """Returns a float32 product times both scales.

    The smaller one comes first: the product of the codes and the scale of an operand of 1e37
    overflows, though the result may be small.
    """
    return product * jnp.minimum(scale, other) * jnp.maximum(scale, other)


_NO_FORWARD_MODE = (
    "An 8-bit matmul or convolution has no derivative in forward mode (jax.jvp, jax.jacfwd, "
    "jax.linearize, jax.hessian). Take it in reverse mode (jax.grad, jax.jacrev), under a policy "
    "without m=, or exclude the layer with a rule."
)
_NO_SECOND_DERIVATIVE = (
    "The gradient of an 8-bit matmul can't be differentiated again, because only its 8-bit "
    "operands are saved. Take second derivatives under a policy without m=, or exclude the "
    "layer with a rule."
)

_Pair = tuple[Quantized, Quantized]


def in_8_bits(
    operation: ScaledOperation,
    lhs: Array,
    rhs: Array,
    codes: _Pair,
    saved: _Pair | None = None,
) -> Array:
    """Runs an operation on the codes of two operands, and returns the accumulator, rescaled.

    Backward runs in 8 bits too, and can't be differentiated again.

    Args:
      codes: the operands.
      saved: the operands as backward takes them, which are its residuals; None for `codes`.
    """
    lhs, rhs = (in_reverse_mode(_NO_FORWARD_MODE, x) for x in (lhs, rhs))
    return _in_8_bits(operation, lhs, rhs, codes, codes if saved is None else saved)


@jax.custom_vjp
def _in_8_bits(
    operation: ScaledOperation, lhs: Array, rhs: Array, codes: _Pair, saved: _Pair
) -> Array:
    del lhs, rhs, saved
    return operation.of_codes(*codes)


def _forward(
    operation: ScaledOperation, lhs: Array, rhs: Array, codes: _Pair, saved: _Pair
) -> tuple[Array, Any]:
    # Arrays of no bytes, whose derivatives are not known to be zero where those of the operands are
    # not.
    marks = [lax.slice_in_dim(x, 0, 0) for x in (lhs, rhs)]
    keeps_input = operation.by.weight_gradient == "compute"
    of_weight = (lhs, rhs)[1 - operation.weight] if keeps_input else None
    result = in_8_bits(operation, lhs, rhs, codes)
    return result, (operation, saved, of_weight, marks)


def _backward(residuals: Any, cotangent: Array) -> tuple[Any, ...]:
    operation, saved, of_weight, marks = residuals
    # The operands' values, which the derivatives of a gradient would need, are not saved.
    cotangent = undifferentiable(_NO_SECOND_DERIVATIVE, cotangent, *marks)
    gradients = []
    for side, mark in enumerate(marks):
        if side == operation.weight and of_weight is not None:
            given = cotangent.astype(of_weight.dtype)
            gradient = operation.gradient(side, given, of_weight, None, mark.dtype)
        else:
            gradient = operation.gradient_of_codes(side, cotangent, saved[1 - side], mark.dtype)
        gradients.append(gradient.astype(mark.dtype))
    return None, *gradients, None, None


_in_8_bits.defvjp(_forward, _backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def undifferentiable(message: str, x: Array, *others: Array) -> Array:
    """Returns `x`, whose derivatives, and those by `others`, raise NotImplementedError."""
    del message, others
    return x


@undifferentiable.defjvp
def _(message: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(message)

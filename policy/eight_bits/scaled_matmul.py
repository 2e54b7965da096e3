"""Matrix multiplications in 8 bits, with scales that are computed from the operands at hand.

Nothing is stored between calls: an operand is divided by a scale that takes its largest magnitude
to the largest number of the 8-bit dtype, cast, multiplied by the 8-bit units of an accelerator into
a float32 or int32 accumulator, and the product is multiplied by the scales of both.

Formats and scaling by row are those of Micikevicius et al., "FP8 formats for deep learning"
(arXiv:2209.05433), and of torchao's float8 training recipes; scales that are powers of two are
those of the row-wise recipe there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from policy.core.mapped_axes import alike_varying
from policy.core.matmul_dtypes import INT8, ScaledMatmul
from policy.eight_bits.once_differentiable import differentiated_once, mark
from policy.eight_bits.quantisation import Quantised, quantise, rescaled, warn_if_emulated
from policy.programs.dtypes import explicit_sharding
from policy.programs.thread import during, thread

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""As of `jax.lax.dot_general`: contracted axes of both operands, and batch axes of both."""


# --------------------------------------------------------------------------------------------------
# The matmul and its gradients
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes of a `dot_general`: results have those of the batch, then the left's, the right's.

    Attributes:
      contracted, batch, free: of the left operand and of the right one.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, numbers: DimensionNumbers, ndims: tuple[int, int]) -> _Axes:
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers
        taken = (*lhs_contracted, *lhs_batch), (*rhs_contracted, *rhs_batch)
        lhs_free, rhs_free = (
            tuple(axis for axis in range(ndim) if axis not in used)
            for ndim, used in zip(ndims, taken, strict=True)
        )
        return cls(
            (tuple(lhs_contracted), tuple(rhs_contracted)),
            (tuple(lhs_batch), tuple(rhs_batch)),
            (lhs_free, rhs_free),
        )

    @property
    def numbers(self) -> DimensionNumbers:
        return self.contracted, self.batch

    def of_result(self, side: int) -> tuple[int, ...]:
        """Returns the axes of the result that are an operand's own."""
        start = len(self.batch[0]) + (len(self.free[0]) if side else 0)
        return tuple(range(start, start + len(self.free[side])))

    def beside_result(self, scale: jax.Array, side: int) -> jax.Array:
        """Returns the scale of an operand in a shape that broadcasts with the result."""
        kept = (*self.batch[side], *self.free[side])
        rows = lax.squeeze(
            jnp.transpose(scale, (*kept, *self.contracted[side])),
            tuple(range(len(kept), scale.ndim)),
        )
        return lax.expand_dims(rows, self.of_result(1 - side))

    def transposed(self, side: int) -> tuple[DimensionNumbers, tuple[int, ...]]:
        """Returns the dimension numbers of an operand's gradient, and the axes of their result.

        The gradient of an operand contracts the cotangent, at the left, and the other operand. The
        axes are those of the operand, in another order.
        """
        other = 1 - side
        batch = tuple(range(len(self.batch[0])))
        numbers = ((self.of_result(other), self.free[other]), (batch, self.batch[other]))
        # The other operand's contracted axes follow, in its order, not in the pairs' order.
        in_order = sorted(
            range(len(self.contracted[other])), key=self.contracted[other].__getitem__
        )
        contracted = (self.contracted[side][i] for i in in_order)
        return numbers, (*self.batch[side], *self.free[side], *contracted)


@dataclasses.dataclass(frozen=True)
class _Matmul:
    """A matmul but for its operands.

    Attributes:
      axes: of the operands and of the result.
      by: the dtypes and scales.
      weight: the operand that is the weight: 0 is the left one.
      dtype: that the result is rounded to.
      sharding: of the result, as in `jax.lax.dot_general`, or None.
      shardings: of the operands where the axes of their mesh are explicit, otherwise None.
    """

    axes: _Axes
    by: ScaledMatmul
    weight: int
    dtype: np.dtype
    sharding: Any
    shardings: tuple[Any, Any]

    def of_gradient(self, side: int, axes: Sequence[int]) -> Any:
        """Returns the sharding of an operand's gradient with its axes in another order."""
        sharding = self.shardings[side]
        if sharding is None:
            return None
        names = (*sharding.spec, *[None] * (len(axes) - len(sharding.spec)))
        return NamedSharding(sharding.mesh, PartitionSpec(*(names[axis] for axis in axes)))


def _product(
    lhs: Quantised,
    rhs: jax.Array,
    numbers: DimensionNumbers,
    options: ScaledMatmul,
    sharding: Any = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Returns the float32 product of codes and codes, in units of both scales.

    Args:
      dtype: that the product is rounded to once it is scaled. Scales of float8 are powers of two:
        in bfloat16, whose range is that of float32, the matmul itself may round, so that devices
        that add up parts of a product exchange bfloat16.
    """
    is_integer = lhs.codes.dtype == INT8
    in_half = not is_integer and jnp.dtype(dtype) == jnp.bfloat16
    product = lax.dot_general(
        lhs.codes,
        rhs,
        numbers,
        # Hopper's tensor cores keep about 14 bits of a sum otherwise (cuBLASLt's CUBLASLT_MATMUL_
        # DESC_FAST_ACCUM, which XLA sets by the precision).
        precision=None if options.fast_accumulation else lax.Precision.HIGHEST,
        preferred_element_type=(
            jnp.int32 if is_integer else jnp.bfloat16 if in_half else jnp.float32
        ),
        out_sharding=sharding,
    )
    return product.astype(jnp.float32)


class _Known(NamedTuple):
    """An operand in 8 bits.

    Attributes:
      array: the operand itself, which is kept so that no other array gets its identity.
      trace: where it was quantised.
      codes: its codes and scales.
    """

    array: jax.Array
    trace: Any
    codes: Quantised


def shared_operands() -> contextlib.AbstractContextManager[None]:
    """Quantises an operand of several matmuls once in a block, as attention's projections have it.

    Its codes and scales are one set of residuals.
    """
    return during(shared_operands={})


def quantise_for(x: jax.Array, contracted: tuple[int, ...], by: ScaledMatmul) -> Quantised:
    """Returns an operand of a matmul in 8 bits, as a constant of differentiation.

    Inside `shared_operands`, matmuls of the same operand share it.
    """
    known: dict[Any, _Known] | None = thread.shared_operands
    key = (id(x), contracted, by.operands, by.scaling)
    # What a checkpoint inside the block computes is its own.
    trace = get_opaque_trace_state(convention="flax")
    found = None if known is None else known.get(key)
    if found is not None and found.trace == trace:
        return found.codes
    codes = quantise(lax.stop_gradient(x), contracted, by.operands, by.scaling)
    if known is not None and found is None:
        known[key] = _Known(x, trace, codes)
    return codes


def scaled_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    by: ScaledMatmul,
    *,
    weight: Literal["lhs", "rhs"] = "rhs",
    dtype: DTypeLike = jnp.float32,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiplies two operands in 8 bits, and returns the accumulator, rescaled.

    Backward multiplies in 8 bits too. Its residuals are the codes and the scales of the operands.
    The scale of an operand that was contracted differently then is folded into the cotangent.
    Gradients have the dtypes of the operands.

    Args:
      lhs, rhs: floating arrays.
      dimension_numbers: as of `jax.lax.dot_general`.
      by: the dtypes and scales.
      weight: the operand whose gradient `by.weight_gradient` is about.
      dtype: of the result, which is rounded to it once.
      out_sharding: of the result, as in `jax.lax.dot_general`.

    Raises:
      NotImplementedError: the gradient is differentiated again.
    """
    warn_if_emulated(by)
    axes = _Axes.of(dimension_numbers, (lhs.ndim, rhs.ndim))
    codes = [
        quantise_for(x, contracted, by)
        for x, contracted in zip((lhs, rhs), axes.contracted, strict=True)
    ]
    shardings = (explicit_sharding(jax.typeof(lhs)), explicit_sharding(jax.typeof(rhs)))
    matmul = _Matmul(axes, by, int(weight == "rhs"), jnp.dtype(dtype), out_sharding, shardings)
    product: Any = _dot(matmul, *alike_varying(lhs, rhs), *codes)
    return product.astype(dtype)


def scaled_einsum(
    subscripts: str,
    lhs: jax.Array,
    rhs: jax.Array,
    by: ScaledMatmul,
    *,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array | None:
    """Contracts two operands in 8 bits, as `scaled_dot_general`.

    Returns None where that is no matmul: where a name stands twice in an operand, or in one operand
    and not in the result.

    Args:
      subscripts: as in `jax.numpy.einsum`, for two operands, with "->".
      lhs, rhs: floating arrays; the right one is the weight.
      by: the dtypes and scales.
      dtype: of the result.
    """
    names = _names(subscripts, lhs.ndim, rhs.ndim)
    if names is None:
        return None
    left, right, out = names
    shared = [name for name in left if name in right]
    is_matmul = all(len(set(part)) == len(part) for part in names) and all(
        name in out for name in (*left, *right) if name not in shared
    )
    if not is_matmul or not set(out) <= {*left, *right}:
        return None
    summed, kept = ([n for n in shared if (n in out) == is_kept] for is_kept in (False, True))
    numbers = (
        ([*map(left.index, summed)], [*map(right.index, summed)]),
        ([*map(left.index, kept)], [*map(right.index, kept)]),
    )
    free = (name for name in (*left, *right) if name not in shared)
    found = [*kept, *free]
    product = scaled_dot_general(lhs, rhs, numbers, by, dtype=dtype)
    return jnp.transpose(product, [found.index(name) for name in out])


def _names(subscripts: str, *ndims: int) -> tuple[list[str], list[str], list[str]] | None:
    """Returns the names of the axes of both operands and of the result.

    The axes of an ellipsis are named by their numbers from the end.
    """
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if not arrow or len(parts) != 2:
        return None
    longest = 0
    found: list[list[str]] = []
    for part, ndim in zip(parts, ndims, strict=True):
        count = ndim - len(part.replace("...", ""))
        if "..." in part:
            longest = max(longest, count)
        before, _, after = part.partition("...")
        inside = [str(i) for i in range(count, 0, -1)] if "..." in part else []
        found.append([*before, *inside, *after])
    before, _, after = output.partition("...")
    inside = [str(i) for i in range(longest, 0, -1)] if "..." in output else []
    return found[0], found[1], [*before, *inside, *after]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    matmul: _Matmul,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_codes: Quantised,
    rhs_codes: Quantised,
) -> jax.Array:
    del lhs, rhs
    axes = matmul.axes
    product = _product(
        lhs_codes, rhs_codes.codes, axes.numbers, matmul.by, matmul.sharding, matmul.dtype
    )
    scales = axes.beside_result(lhs_codes.scale, 0), axes.beside_result(rhs_codes.scale, 1)
    return rescaled(product, *scales)


def _forward(
    matmul: _Matmul,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_codes: Quantised,
    rhs_codes: Quantised,
) -> tuple[jax.Array, Any]:
    operands, codes = (lhs, rhs), (lhs_codes, rhs_codes)
    marks = tuple(map(mark, operands))
    keeps_input = matmul.by.weight_gradient == "compute"
    of_weight = operands[1 - matmul.weight] if keeps_input else None
    return _dot(matmul, *operands, *codes), (codes, of_weight, marks)


def _backward(matmul: _Matmul, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    codes, of_weight, marks = saved
    cotangent = differentiated_once(cotangent, *marks)
    gradients = [
        _gradient_in_compute_dtype(matmul, side, cotangent, of_weight, marks[side].dtype)
        if side == matmul.weight and of_weight is not None
        else _gradient(matmul, side, cotangent, codes[1 - side], marks[side].dtype)
        for side in (0, 1)
    ]
    return *(x.astype(one.dtype) for x, one in zip(gradients, marks, strict=True)), None, None


_dot.defvjp(_forward, _backward)


def _gradient(
    matmul: _Matmul, side: int, cotangent: jax.Array, other: Quantised, dtype: DTypeLike
) -> jax.Array:
    """Returns the gradient of an operand from the 8-bit codes of the other one, in float32.

    Args:
      dtype: that it is rounded to.
    """
    by, (numbers, axes) = matmul.by, matmul.axes.transposed(side)
    folded = cotangent * matmul.axes.beside_result(other.scale, 1 - side)
    contracted = matmul.axes.of_result(1 - side)
    given = quantise(folded, contracted, by.gradients, by.scaling)
    sharding = matmul.of_gradient(side, axes)
    product = _product(given, other.codes, numbers, by, sharding, dtype)
    rows = lax.squeeze(given.scale, contracted)
    scale = lax.expand_dims(rows, range(rows.ndim, product.ndim))
    return jnp.transpose(product * scale, _inverse(axes))


def _gradient_in_compute_dtype(
    matmul: _Matmul, side: int, cotangent: jax.Array, other: jax.Array, dtype: DTypeLike
) -> jax.Array:
    numbers, axes = matmul.axes.transposed(side)
    product = lax.dot_general(
        cotangent.astype(other.dtype),
        other,
        numbers,
        preferred_element_type=dtype if dtype == other.dtype else jnp.float32,
        out_sharding=matmul.of_gradient(side, axes),
    )
    return jnp.transpose(product, _inverse(axes))


def _inverse(permutation: Sequence[int]) -> list[int]:
    return [permutation.index(place) for place in range(len(permutation))]

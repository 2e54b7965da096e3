"""Normalization of half-precision arrays, for both APIs: exact statistics, and the derivative in
closed form.

The mean and the variance are computed in one pass and without rounding. The square of a number of p
significant bits has 2p. Cut into two halves of p bits, up to 2^(24 - p) squares of numbers close to
each other add up in float32 without rounding: 65536 of bfloat16 (p = 8), 8192 of float16 (p = 11).
So do the numbers themselves. Numbers far from each other round, but then the variance is large and
nothing cancels.

So the variance comes out of sums that one kernel takes in one pass, and XLA fuses such sums into
the operation that makes the numbers. With a shift that depends on the data, or in two passes, it
would write the numbers first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from mpmodules.functions.functional import broadcast_like
from policy.functions.checkpointing import cached_inline_jit

Array = jax.Array
_Parts = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Region:
    """The elements of an array that share one mean and one variance.

    Attributes:
      axes: reduced over; not negative, in rising order.
      groups: into how many equal parts the last axis, which is none of `axes`, is cut; each part is
        reduced over. 0 leaves the last axis alone.

    Example:
      >>> rows = normalization.Region((1,))
      >>> rows, rows.sum(jnp.ones((2, 3))).shape
      (Region(axes=(1,), groups=0), (2, 1))
    """

    axes: tuple[int, ...]
    groups: int = 0

    def size(self, shape: Sequence[int]) -> int:
        """Returns the number of elements that share a mean in an array of that shape."""
        width = shape[-1] // self.groups if self.groups else 1
        return math.prod(shape[axis] for axis in self.axes) * width

    def sum(self, x: Array) -> Array:
        """Returns the sums.

        Axes reduced over are 1; along the last one, each channel has the sum of its group.
        """
        total = x.sum(self.axes, keepdims=True)
        if not self.groups:
            return total
        width = x.shape[-1] // self.groups
        by_group = total.reshape(*total.shape[:-1], self.groups, width).sum(-1)
        return jnp.repeat(by_group, width, axis=-1)

    def mean(self, x: Array) -> Array:
        """Returns the means, in the shape of the sums."""
        size = self.size(x.shape)
        return self.sum(x) / (size if isinstance(size, int) else jnp.asarray(size, x.dtype))


def moments(region: Region, x: Array) -> tuple[Array, Array, Array]:
    """Computes the mean, as the sum of two numbers, and the variance of half-precision numbers over
    a region.

    The relative error of the variance is at most 1e-4 for any mean, and 5e-4 where it is joined
    from parts.

    Args:
      region: the elements that share a mean.
      x: bfloat16, float16 or an 8-bit float, any shape that is not empty.

    Returns:
      Three float32 arrays with the rank of `x`, which broadcast against it: a number close to the
      mean, the rest of the mean, and the variance. The variance is NaN where float32 can't hold the
      square of an element, which is then 2^64 or more.

    Example:
      >>> x = jnp.asarray([[1000.0, 1008.0]], jnp.bfloat16)
      >>> centre, offset, variance = normalization.moments(normalization.Region((1,)), x)
      >>> float(centre[0, 0] + offset[0, 0]), float(variance[0, 0])
      (1004.0, 16.0)
    """
    info = jnp.finfo(x.dtype)
    precision = info.nmant + 1
    wide = _as_rounded(x)  # the sums are exact only of rounded numbers
    is_known = all(isinstance(x.shape[axis], int) for axis in region.axes)  # not of `jax.export`
    halves = _parts(wide.shape, region.axes, 2 ** (24 - precision)) if is_known else None
    if halves is None:
        return _in_two_passes(region, wide)
    by_halves = functools.partial(_of_parts, region, precision, halves)
    # Along columns XLA for GPUs takes two sums in one pass over their numbers, but not three.
    squares = _parts(*_merged(wide, region.axes), _whole_squares(precision))
    if squares is None or wide.ndim - 1 in region.axes:
        return by_halves(wide)
    by_squares = functools.partial(_of_parts, region, precision, squares, cuts=False)
    return lax.platform_dependent(wide, cuda=by_squares, rocm=by_squares, default=by_halves)


def _as_rounded(x: Array) -> Array:
    """Returns `x` in float32; XLA keeps its rounding, as in `policy.functions.checkpointing`."""
    return lax.reduce_precision(x.astype(jnp.float32), 8, int(jnp.finfo(x.dtype).nmant))


def _in_two_passes(region: Region, wide: Array) -> tuple[Array, Array, Array]:
    mean = region.mean(wide)
    return mean, jnp.zeros_like(mean), region.mean(jnp.square(wide - mean))


def _whole_squares(precision: int) -> int:
    """Returns how many squares of numbers of `precision` bits add up in float32 without rounding.

    Half of those that fit at one exponent: numbers on either side of a power of two have two.
    """
    return 2 ** max(23 - 2 * precision, 0)


def _of_parts(
    region: Region, precision: int, parts: _Parts, wide: Array, *, cuts: bool = True
) -> tuple[Array, Array, Array]:
    """Computes the moments of parts, and from those the region's. `cuts`: see `_exact_moments`."""
    shape, inner, outer = parts
    found = _exact_moments(wide.reshape(shape), Region(inner), precision, cuts=cuts)
    if outer or region.groups:
        found = _joined(*found, Region(outer, region.groups), precision)
    kept = tuple(1 if axis in region.axes else size for axis, size in enumerate(wide.shape))
    return found[0].reshape(kept), found[1].reshape(kept), found[2].reshape(kept)


def _merged(x: Array, axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of `x` with neighbors among `axes` made one, and those axes in it.

    Where a mesh has explicit axes, which one of the two may be sharded along, it is the shape as it
    is.
    """
    if not jax.typeof(x).sharding.mesh.empty:
        return x.shape, tuple(axes)
    shape: list[int] = []
    merged: list[int] = []
    for axis, size in enumerate(x.shape):
        if axis in axes and axis - 1 in axes:
            shape[-1] *= size
            continue
        if axis in axes:
            merged.append(len(shape))
        shape.append(size)
    return tuple(shape), tuple(merged)


def _parts(shape: Sequence[int], axes: Sequence[int], limit: int) -> _Parts | None:
    """Returns a shape with axes that hold at most `limit` elements together, those axes, and the
    other reduced ones.

    An axis that is longer is cut in two. None where no divisor allows that.
    """
    sizes: list[int] = []
    reduced: list[int] = []
    for axis, size in enumerate(shape):
        pieces = [size]
        if axis in axes and size > limit:
            width = next(width for width in range(limit, 0, -1) if size % width == 0)
            if width < 64:  # so many parts that their sums would cost more than a second pass
                return None
            pieces = [size // width, width]
        if axis in axes:
            reduced += range(len(sizes), len(sizes) + len(pieces))
        sizes += pieces
    inner: list[int] = []
    for axis in reversed(reduced):
        if math.prod(sizes[i] for i in (*inner, axis)) <= limit:
            inner.append(axis)
    return tuple(sizes), tuple(sorted(inner)), tuple(axis for axis in reduced if axis not in inner)


def _exact_moments(
    x: Array, region: Region, precision: int, *, cuts: bool = True
) -> tuple[Array, Array, Array]:
    """Computes the mean, as the sum of two numbers, and the variance of numbers with `precision`
    bits.

    With S and Q the sums of x and of x^2 and c a number of `precision` bits close to the mean, the
    squared distances from c add up to (Q - c S) - c (S - n c). Of numbers close to each other, not
    more than 2^(24 - precision), each product and each difference in it is exact.

    Args:
      cuts: whether Q is the sum of two halves of each square. Whole squares add up exactly where
        they are not more than `_whole_squares`.
    """
    count = np.float32(region.size(x.shape))
    square = x * x
    leading = _leading_bits(square, precision) if cuts else square
    total, high = region.sum(x), region.sum(leading)
    low = region.sum(square - leading) if cuts else jnp.zeros_like(high)
    centre = _leading_bits(total / count, precision)
    rest = total - count * centre
    total_high = _leading_bits(total, 12)
    about_centre = (high - centre * total_high) + (low - centre * (total - total_high))
    about_centre = about_centre - centre * rest
    offset = rest / count
    return centre, offset, jnp.maximum(about_centre - rest * offset, 0) / count


def _joined(
    centre: Array, offset: Array, variance: Array, among: Region, precision: int
) -> tuple[Array, Array, Array]:
    """Computes the moments of a whole from those of its parts, of equal size.

    The mean is the sum of two numbers.

    The whole's variance is the mean of the parts' and the variance of their means; that of the
    centres is exact, and the rest is small beside it. All sums are of one pass, so that devices
    exchange them at once.
    """
    whole, rest, between = _exact_moments(centre, among, precision)
    offsets = among.mean(offset)
    within = among.mean(variance + offset * offset) - offsets * offsets
    covariance = among.mean(centre * offset) - (whole + rest) * offsets
    return whole, rest + offsets, jnp.maximum(within + between + 2 * covariance, 0)


def _leading_bits(x: Array, count: int) -> Array:
    """Truncates float32 `x` to its first `count` significant bits."""
    mask = np.uint32(0xFFFFFFFF << (24 - count) & 0xFFFFFFFF)
    bits = lax.bitcast_convert_type(x, jnp.uint32) & mask
    return lax.bitcast_convert_type(bits, jnp.float32)


def shift_of(region: Region, x: Array) -> Array | None:
    """Returns the mean of four elements of each region of `x`, with no gradient.

    Returns None for an empty array.

    A normalization is the same for `x` and `x - shift_of(region, x)`, forward and backward, but the
    one-pass variance E[x^2] - E[x]^2 of the shifted numbers does not cancel where the mean is large
    against the spread (measured at mean 1000 and spread 1, float32: 3e-5 against 0.42 unshifted and
    7e-5 in two passes). Four elements, because a single one may lie far out: the cancellation grows
    with the square of its distance from the mean.

    Args:
      region: the elements that share a mean. Four of them are read, at even distances along each
        axis.
      x: floating, any shape.

    Returns:
      An array with the rank of `x` that broadcasts against it.

    Example:
      >>> normalization.shift_of(normalization.Region((0,)), jnp.asarray([1.0, 2.0, 3.0, 4.0]))
      Array([2.5], dtype=float32)
    """
    if x.size == 0:
        return None
    axes = region.axes
    if region.groups:
        x = x.reshape(*x.shape[:-1], region.groups, x.shape[-1] // region.groups)
        axes = (*axes, x.ndim - 1)

    def quarter(i: int) -> Array:
        places = [
            slice(n * i // 4, n * i // 4 + 1) if axis in axes else slice(None)
            for axis, n in enumerate(x.shape)
        ]
        return x[tuple(places)] * np.asarray(0.25, x.dtype)  # before the sum, which could overflow

    shift = lax.stop_gradient(quarter(1) + quarter(2) + quarter(3) + quarter(0))
    return jnp.repeat(shift[..., 0], x.shape[-1], axis=-1) if region.groups else shift


# --------------------------------------------------------------------------------------------------
# Normalization, and its derivative
# --------------------------------------------------------------------------------------------------


def normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    region: Region,
    epsilon: float,
    dtype: DTypeLike,
) -> tuple[Array, Array, Array]:
    """Computes (x - mean) / sqrt(variance + epsilon) * scale + bias in float32, and rounds the
    result once.

    Backward keeps `x` as it came, the mean and the variance, and reads `x` twice.

    Args:
      x: half precision, any shape that is not empty.
      scale, bias: float32, with the rank of `x` and broadcastable to it; or None.
      region: the elements that share a mean and a variance.
      epsilon: added to the variance.
      dtype: of the result.

    Returns:
      The normalized array in `dtype`; the mean and the variance, float32, which broadcast against
      `x`.

    Example:
      >>> x = jnp.asarray([[1000.0, 1008.0]], jnp.bfloat16)
      >>> y, mean, variance = normalization.normalize(
      ...     x, None, None, region=normalization.Region((1,)), epsilon=0.0, dtype=jnp.bfloat16
      ... )
      >>> y
      Array([[-1, 1]], dtype=bfloat16)
    """
    run = cached_inline_jit(_normalize, region, float(epsilon), jnp.dtype(dtype))
    y, centre, offset, variance = run(x, scale, bias)
    return y, centre if offset is None else centre + offset, variance


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _normalize(
    region: Region,
    epsilon: float,
    dtype: np.dtype,
    x: Array,
    scale: Array | None,
    bias: Array | None,
) -> tuple[Array, Array, Array | None, Array]:
    """Returns the result; the mean, in two numbers where that costs nothing; and the variance."""
    centre, offset, variance = cached_inline_jit(moments, region)(x)
    if x.ndim - 1 in region.axes:
        # One number for each row: TPUs spread a second one over the lanes at a cost.
        centre, offset = centre + offset, None
    root = lax.rsqrt(variance + epsilon)
    factor = root if scale is None else root * scale
    y = (_as_rounded(x) - centre) * factor  # the difference is exact where the two are close
    if offset is not None:
        bias = _less(bias, offset * factor)
    return (y if bias is None else y + bias).astype(dtype), centre, offset, variance


def _normalize_jvp(
    region: Region,
    epsilon: float,
    dtype: np.dtype,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Any, Any]:
    x, scale, bias = primals
    y, centre, offset, variance = _normalize(region, epsilon, dtype, x, scale, bias)
    given = [None if isinstance(t, SymbolicZero) else t for t in tangents]
    if given[1] is not None or given[2] is not None:
        # XLA would sum the narrowed gradients of scale and bias with those of the matmuls' kernels,
        # and keep these until then.
        given[1:] = _kept_apart(*given[1:])
    # Checkpointed: the normalized array is computed again from `x`, in the kernels of backward that
    # read `x` anyway.
    run = functools.partial(_derivative, region, epsilon, y)
    derivative = jax.checkpoint(run, prevent_cse=False)
    moved = derivative((x, scale, centre, offset, variance), given)
    return (y, centre, offset, variance), moved


def _derivative(
    region: Region,
    epsilon: float,
    y: Array,
    residuals: Sequence[Any],
    tangents: Sequence[Array | None],
) -> tuple[Array, Array, Array | None, Array]:
    """Returns the tangents of what `_normalize` returns.

    Args:
      residuals: `x`, the scale, the mean in two numbers, and the variance.
      tangents: those of `x`, of the scale and of the bias.
    """
    x, scale, centre, offset, variance = residuals
    x_tangent, by_normalized, by_region = tangents
    root = lax.rsqrt(variance + epsilon)
    factor = root if scale is None else root * scale
    centered = _as_rounded(x) - centre
    is_shared = all(factor.shape[axis] == 1 for axis in region.axes)
    if not is_shared and offset is not None:
        centered = centered - offset
    mean_tangent = variance_tangent = jnp.zeros_like(variance)
    by_element = along = None
    if x_tangent is not None:
        wide = x_tangent.astype(jnp.float32)
        mean_tangent, along = region.mean(wide), region.mean(wide * centered)
        if is_shared and offset is not None:
            along = along - offset * mean_tangent
        along = along * root
        variance_tangent = 2 * along / root
        if is_shared:
            by_element = wide * factor
        else:
            by_element = wide * root - mean_tangent * root - centered * (along * root * root)
            by_element = by_element if scale is None else by_element * scale
    if is_shared:
        # The factors come after the sums: those of the transpose are then the scale's and the
        # bias's as well, and an element is multiplied and added to as seldom as can be.
        if along is not None:
            by_normalized = _less(by_normalized, along * factor)
            by_region = _less(by_region, mean_tangent * factor)
        if by_normalized is not None:
            by_centered = root * by_normalized
            by_element = _sum(by_element, centered * by_centered)
            by_region = by_region if offset is None else _less(by_region, offset * by_centered)
    elif by_normalized is not None:
        # Numbers that a row shares are multiplied with each other before they meet an element.
        by_element = _sum(by_element, centered * root * by_normalized)
    if by_region is not None:
        by_element = _sum(by_element, by_region)
    by_element = jnp.zeros(x.shape, jnp.float32) if by_element is None else by_element
    # A scale may be sharded where `x` is not.
    through = broadcast_like(by_element, y).astype(y.dtype)
    if offset is None:
        return through, mean_tangent, None, variance_tangent
    return through, jnp.zeros_like(mean_tangent), mean_tangent, variance_tangent


def _kept_apart(*tangents: Array | None) -> list[Array | None]:
    """Puts tangents behind a barrier, without their axes of size 1.

    XLA leaves those axes out of its kernels: a tangent that has them there gets two small kernels
    of its own.
    """
    flat = [None if t is None else lax.reshape(t, [n for n in t.shape if n != 1]) for t in tangents]
    pairs = zip(lax.optimization_barrier(flat), tangents, strict=True)
    return [None if t is None else lax.reshape(b, t.shape) for b, t in pairs]


def _sum(x: Array | None, y: Array) -> Array:
    return y if x is None else x + y


def _less(x: Array | None, y: Array) -> Array:
    return -y if x is None else x - y


_normalize.defjvp(_normalize_jvp, symbolic_zeros=True)

"""Normalisation of half-precision arrays, for both wings: exact statistics, and the derivative in
closed form.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from mpmodules.functions.functional import broadcast_like
from mpmodules.functions.moments import Region, moments
from policy.functions.checkpointing import cached_inline_jit

Array = jax.Array


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
      The normalised array in `dtype`; the mean and the variance, float32, which broadcast against
      `x`.

    Example:
      >>> x = jnp.asarray([[1000.0, 1008.0]], jnp.bfloat16)
      >>> y, mean, variance = normalization.normalize(
      ...     x, None, None, region=moments.Region((1,)), epsilon=0.0, dtype=jnp.bfloat16
      ... )
      >>> y
      Array([[-1, 1]], dtype=bfloat16)
    """
    y, centre, offset, variance = cached_inline_jit(
        _normalize, region, float(epsilon), jnp.dtype(dtype)
    )(x, scale, bias)
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
    if (
        x.ndim - 1 in region.axes
    ):  # one number for each row: TPUs spread a second one over the lanes at a cost
        centre, offset = centre + offset, None
    root = lax.rsqrt(variance + epsilon)
    factor = root if scale is None else root * scale
    y = (x.astype(jnp.float32) - centre) * factor  # the difference is exact where the two are close
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
    x_tangent, scale_tangent, bias_tangent = (
        None if isinstance(t, SymbolicZero) else t for t in tangents
    )
    if scale_tangent is not None or bias_tangent is not None:
        # XLA would sum the narrowed gradients of both with those of the matmuls' kernels, and keep
        # these until then.
        scale_tangent, bias_tangent = _kept_apart(scale_tangent, bias_tangent)
    # Checkpointed: the normalised array is computed again from `x`, in the kernels of backward that
    # read `x` anyway.
    derivative = jax.checkpoint(
        functools.partial(_derivative, region, epsilon, y), prevent_cse=False
    )
    tangents_out = derivative(
        x, scale, centre, offset, variance, x_tangent, scale_tangent, bias_tangent
    )
    return (y, centre, offset, variance), tangents_out


def _derivative(
    region: Region,
    epsilon: float,
    y: Array,
    x: Array,
    scale: Array | None,
    centre: Array,
    offset: Array | None,
    variance: Array,
    x_tangent: Array | None,
    by_normalized: Array | None,
    by_region: Array | None,
) -> tuple[Array, Array, Array | None, Array]:
    """Returns the tangents of what `_normalize` returns. `by_normalized` and `by_region` are those
    of the scale and the bias.
    """
    root = lax.rsqrt(variance + epsilon)
    factor = root if scale is None else root * scale
    centred = x.astype(jnp.float32) - centre
    is_shared = all(factor.shape[axis] == 1 for axis in region.axes)
    if not is_shared and offset is not None:
        centred = centred - offset
    mean_tangent = variance_tangent = jnp.zeros_like(variance)
    by_element = along = None
    if x_tangent is not None:
        wide = x_tangent.astype(jnp.float32)
        mean_tangent, along = region.mean(wide), region.mean(wide * centred)
        if is_shared and offset is not None:
            along = along - offset * mean_tangent
        along = along * root
        variance_tangent = 2 * along / root
        if is_shared:
            by_element = wide * factor
        else:
            by_element = wide * root - mean_tangent * root - centred * (along * root * root)
            by_element = by_element if scale is None else by_element * scale
    if is_shared:
        # The factors come after the sums: those of the transpose are then the scale's and the
        # bias's as well, and an element is multiplied and added to as seldom as can be.
        if along is not None:
            by_normalized = _less(by_normalized, along * factor)
            by_region = _less(by_region, mean_tangent * factor)
        if by_normalized is not None:
            by_centred = root * by_normalized
            by_element = _sum(by_element, centred * by_centred)
            by_region = by_region if offset is None else _less(by_region, offset * by_centred)
    elif by_normalized is not None:
        # Numbers that a row shares are multiplied with each other before they meet an element.
        by_element = _sum(by_element, centred * root * by_normalized)
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

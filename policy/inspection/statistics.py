"""How far one array is from another: a handful of numbers, computed where the arrays are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

# What stands for minus infinity in a mask would be the whole norm of what it masks, and its square overflows.
_FILL = 1e18
# In the order of `measured`. Of each, more is worse: so the largest of several is the worst.
NAMES = ("error", "distance", "underflow", "subnormal", "overflow", "largest", "reference_largest", "undefined")


def measured(value: Any, reference: Any, axes: Sequence[str] = ()) -> Any:
    """`NAMES` of a floating array against one in float32 (or wider), as a float32 vector.

    error              norm of the difference / norm of the reference; infinite where a value overflows. The norms leave
                       out what is beyond 1e18, which fills masks.
    distance           1 - cosine of the angle between the two.
    underflow          share of the elements that are 0 where the reference is not.
    subnormal          share of the elements that are subnormal in `value`'s dtype.
    overflow           share of the elements that are infinite or NaN where the reference is finite.
    largest            the largest magnitude, infinite where there is a NaN or an infinity.
    reference_largest  the same of the reference, where that is finite.
    undefined          share of the elements where the reference is infinite or NaN itself.

    Args:
      value, reference: arrays of one shape.
      axes: mesh axes over which each device has its own part of both.
    """
    x, tiny = value.astype(reference.dtype), float(jnp.finfo(value.dtype).tiny)
    magnitude, size = jnp.abs(x), jnp.abs(reference)
    is_finite, was_finite = jnp.isfinite(x), jnp.isfinite(reference)
    counts = is_finite & (size < _FILL) & (magnitude < _FILL)
    zero = jnp.zeros((), reference.dtype)
    difference = jnp.where(counts, x - reference, zero)
    x_kept, kept = jnp.where(counts, x, zero), jnp.where(counts, reference, zero)
    sums = jnp.stack(
        [
            jnp.sum(difference * difference),
            jnp.sum(kept * kept),
            jnp.sum(x_kept * kept),
            jnp.sum(x_kept * x_kept),
            _count((x == 0) & (reference != 0)),
            _count((x != 0) & (magnitude < tiny)),
            _count(was_finite & ~is_finite),
            _count(~was_finite),
            jnp.full((), math.prod(value.shape), jnp.float32),
        ]
    ).astype(jnp.float32)
    largest = jnp.stack([_largest(jnp.where(is_finite, magnitude, jnp.inf)), _largest(jnp.where(was_finite, size, 0))])
    if axes:
        sums, largest = lax.psum(sums, tuple(axes)), lax.pmax(largest, tuple(axes))
    return _named(sums, largest)


def largest_alone(value: Any, axes: Sequence[str] = ()) -> Any:
    """`NAMES` of an array that is its own reference."""
    largest = _largest(jnp.abs(value).astype(jnp.float32))
    if axes:
        largest = lax.pmax(largest, tuple(axes))
    zeros = jnp.zeros((), jnp.float32)
    found = {"largest": largest, "reference_largest": largest}
    return jnp.stack([found.get(name, zeros) for name in NAMES])


def _count(mask: Any) -> Any:
    return jnp.sum(mask, dtype=jnp.float32)


def _largest(array: Any) -> Any:
    return jnp.max(array, initial=0).astype(jnp.float32)


def _named(sums: Any, largest: Any) -> Any:
    difference, kept, product, own, underflow, subnormal, overflow, undefined, size = sums
    size = jnp.maximum(size, 1)
    error = jnp.where(difference == 0, 0, jnp.sqrt(difference / kept))
    error = jnp.where((overflow > 0) | jnp.isnan(error), jnp.inf, error)
    norms = jnp.sqrt(kept) * jnp.sqrt(own)
    cosine = jnp.where(norms == 0, jnp.where(kept == own, 1, 0), product / norms)
    cosine = jnp.where(overflow > 0, 0, cosine)
    shares = [count / size for count in (underflow, subnormal, overflow)]
    return jnp.stack([error, 1 - jnp.minimum(cosine, 1), *shares, largest[0], largest[1], undefined / size])


def limit_of(dtype: Any) -> float:
    """The largest finite number of a floating dtype."""
    return float(jnp.finfo(np.dtype(dtype)).max)

"""Distances between two arrays: a few numbers, computed on the arrays' device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# Masks' stand-ins for minus infinity would dominate the norm, and their squares overflow.
_FILL = 1e18
# In the order of `measured`. For each, larger is worse, so the largest of several is the worst.
NAMES = (
    "error",
    "distance",
    "underflow",
    "subnormal",
    "overflow",
    "largest",
    "reference_largest",
    "undefined",
    "rms",
)


def measured(value: Any, reference: Any) -> Any:
    """Returns `NAMES` of an array against a reference, as a float32 vector.

    Half precision is widened to float32.

    A complex array is measured as its real and imaginary parts. For integers and booleans, error
    and distance are the share of the elements that differ, and nothing underflows or overflows.

        error              norm of the difference / norm of the reference; infinite where a value
                           overflows. The norms leave out magnitudes beyond 1e18, which fill masks.
        distance           1 - cosine of the angle between the two.
        underflow          share of the elements that are 0 where the reference is not.
        subnormal          share of the elements that are subnormal in `value`'s dtype.
        overflow           share of the elements that are infinite or NaN where the reference is
                           finite.
        largest            the largest magnitude, infinite if there is a NaN or an infinity.
        reference_largest  the largest finite magnitude of the reference.
        undefined          share of the elements where the reference itself is infinite or NaN.
        rms                root mean square of the difference; infinite where a value overflows.

    Args:
      value, reference: arrays of one shape.
    """
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return _share(value, reference)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value, reference = (
            jnp.stack([lax.real(array), lax.imag(array)]) for array in (value, reference)
        )
    tiny = float(jnp.finfo(value.dtype).tiny)
    dtypes = np.dtype(np.float32), value.dtype, reference.dtype
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    return _named(*_reduced(value.astype(wide), reference.astype(wide), tiny))


def _share(value: Any, reference: Any) -> Any:
    counts = jnp.stack([jnp.sum(value != reference), jnp.full((), value.size)]).astype(jnp.float32)
    sides = [jnp.abs(array.astype(jnp.float32)) for array in (value, reference)]
    largest = jnp.stack([_largest(side) for side in sides])
    differ = counts[0] / jnp.maximum(counts[1], 1)
    return _vector(error=differ, distance=differ, largest=largest[0], reference_largest=largest[1])


def _vector(**found: Any) -> Any:
    """Returns numbers in the order of `NAMES`, zeros where there are none."""
    return jnp.stack([found.get(name, jnp.zeros((), jnp.float32)) for name in NAMES])


def _reduced(x: Any, reference: Any, tiny: float) -> tuple[Any, Any]:
    """Computes sums and maxima in one variadic reduction, which XLA fuses with its producers.

    Separate reductions would each write their operand to memory, and be compiled separately.
    """
    magnitude, size = jnp.abs(x), jnp.abs(reference)
    is_finite, was_finite = magnitude < jnp.inf, size < jnp.inf
    counts = (size < _FILL) & (magnitude < _FILL)
    zero = jnp.zeros((), reference.dtype)
    difference = jnp.where(counts, x - reference, zero)
    x_kept, kept = jnp.where(counts, x, zero), jnp.where(counts, reference, zero)
    masks = (
        counts,
        (x == 0) & (reference != 0),
        (x != 0) & (magnitude < tiny),
        was_finite & ~is_finite,
        ~was_finite,
    )
    counted = [mask.astype(reference.dtype) for mask in masks]
    added = [difference * difference, kept * kept, x_kept * x_kept, *counted]
    compared = [magnitude, jnp.where(was_finite, size, zero)]
    n, operations = len(added), [lax.add] * len(added) + [lax.max] * len(compared)
    found = reduced([*added, *compared], operations)
    count = jnp.full((), math.prod(x.shape), jnp.float32)
    sums = jnp.stack([*(one.astype(jnp.float32) for one in found[:n]), count])
    return sums, jnp.stack(found[n:]).astype(jnp.float32)


def reduced(operands: Sequence[Any], operations: Sequence[Any]) -> Sequence[Any]:
    """Reduces arrays of one shape, each by its operation, to numbers in one pass."""
    if not operands[0].ndim:
        return operands
    zeros = tuple(jnp.zeros((), operand.dtype) for operand in operands)

    def combine(a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
        return tuple(f(x, y) for f, x, y in zip(operations, a, b, strict=True))

    return lax.reduce(tuple(operands), zeros, combine, tuple(range(operands[0].ndim)))


def _largest(array: Any) -> Any:
    return jnp.max(array, initial=0).astype(jnp.float32)


def _named(sums: Any, largest: Any) -> Any:
    difference, kept, own, counted, underflow, subnormal, overflow, undefined, size = sums
    size = jnp.maximum(size, 1)
    rms = jnp.sqrt(difference / jnp.maximum(counted, 1))
    rms = jnp.where((overflow > 0) | jnp.isnan(rms), jnp.inf, rms)
    error = jnp.where(difference == 0, 0, jnp.sqrt(difference / kept))
    # Squares of numbers below 1e-22 are zero: then the largest elements stand for all.
    is_tiny = (kept == 0) & (largest[1] > 0) & (largest[1] < 1e-18)
    error = jnp.where(is_tiny, jnp.abs(largest[0] - largest[1]) / largest[1], error)
    error = jnp.where((overflow > 0) | jnp.isnan(error), jnp.inf, error)
    # By the law of cosines: 1 - cosine would be a difference of nearly equal numbers.
    norms, lengths = jnp.sqrt(kept * own), jnp.sqrt(kept) - jnp.sqrt(own)
    distance = jnp.where(
        norms == 0, (kept != own).astype(jnp.float32), (difference - lengths**2) / (2 * norms)
    )
    distance = jnp.where(overflow > 0, 1, jnp.clip(distance, 0, 2))
    shares = [count / size for count in (underflow, subnormal, overflow)]
    own_largest = jnp.where((overflow > 0) | jnp.isnan(largest[0]), jnp.inf, largest[0])
    return jnp.stack([error, distance, *shares, own_largest, largest[1], undefined / size, rms])


def shares_of_codes(codes: Any, source: Any) -> Any:
    """Returns the share of 8-bit codes that are the largest, and of zeros that were not zero.

    Args:
      codes: in float8 or int8.
      source: of the same shape; the numbers before they were limited, rounded and cast.
    """
    size = max(codes.size, 1)
    wide = jnp.abs(codes.astype(jnp.float32))
    saturated = jnp.sum(wide >= limit_of(codes.dtype), dtype=jnp.float32) / size
    lost = jnp.sum((wide == 0) & (source != 0), dtype=jnp.float32) / size
    return jnp.stack([saturated, lost])


def limit_of(dtype: DTypeLike) -> float:
    """Returns the largest finite number of a dtype."""
    if dtype == np.bool_:
        return 1.0
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    return float(info(np.dtype(dtype)).max)


def is_discrete(dtype: DTypeLike) -> bool:
    """Returns whether a dtype holds integers or booleans."""
    return dtype == np.bool_ or bool(jnp.issubdtype(dtype, jnp.integer))


def is_float(dtype: DTypeLike) -> bool:
    """Returns whether a dtype holds real floats."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_measurable(dtype: DTypeLike) -> bool:
    """Returns whether arrays of a dtype can be compared: numbers and booleans, not random keys."""
    return dtype is not None and (is_discrete(dtype) or bool(jnp.issubdtype(dtype, jnp.inexact)))


def has_nan(array: Any) -> Any:
    """Returns whether a floating array contains NaN."""
    return jnp.any(jnp.isnan(array)) if is_float(array.dtype) else np.False_

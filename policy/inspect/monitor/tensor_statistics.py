"""Statistics of one array, computed on its device: magnitudes and shares of its elements.

Magnitudes are compared by their bits, which are exact where a device flushes subnormal numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.compare.statistics import reduced

COUNTS = ("zeros", "nan", "inf", "below", "above", "lost")
STATISTICS = ("largest", "inverse_smallest", "squares", *COUNTS)
"""The numbers of an array, in the order of `statistics_of`."""


def bits_of(array: Any) -> tuple[Any, np.dtype]:
    """Returns the magnitudes of a floating array, as unsigned integers in the same order.

    Returns:
      uint32 or uint64: the bits of the array upcast to float32, or of float64, without signs. And
      that dtype.
    """
    if array.dtype == jnp.float64:
        bits = lax.bitcast_convert_type(array, jnp.uint64)
        return bits & np.uint64(2**63 - 1), np.dtype("float64")
    if array.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        bits = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
    return bits & np.uint32(2**31 - 1), np.dtype("float32")


@functools.partial(jax.jit, static_argnames="axes")
def statistics_of(array: Any, axes: tuple[str, ...] = (), lost: Any = None) -> Any:
    """Returns `STATISTICS` of an array, as a float32 vector, float64 for float64.

    A complex array is measured as its real and imaginary parts.

        largest            the largest finite magnitude.
        inverse_smallest   the bits of infinity minus those of the least non-zero magnitude, as a
                           number; 0 if there is none. It is larger for a smaller one.
        squares            sum of the squares of the finite values over `largest`, which is taken
                           as one whose inverse is normal.
        zeros, nan, inf    counts of elements.
        below, above       counts of subnormal elements, and of those at the dtype's largest number.
        lost               count of the elements that are True in `lost`.

    Args:
      array: floating or complex, of any shape.
      axes: mesh axes over which each device has its own part.
      lost: booleans of the array's shape, or None.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([lax.real(array), lax.imag(array)])
    numbers, wide = bits_of(array)
    info = jnp.finfo(array.dtype)
    infinite, smallest, limit = (
        wide.type(edge).view(numbers.dtype)
        for edge in (np.inf, float(info.smallest_normal), float(info.max))
    )
    is_finite, is_some, none = numbers < infinite, numbers > 0, numbers.dtype.type(0)
    magnitudes = jnp.where(is_finite, numbers, none)
    inverses = jnp.where(is_finite & is_some, infinite - numbers, none)
    maxima = jnp.stack(reduced([magnitudes, inverses], [lax.max] * 2))
    maxima = lax.pmax(maxima, axes) if axes else maxima
    maxima = lax.bitcast_convert_type(maxima, wide)
    unit = jnp.clip(maxima[0], *_units(wide))
    shares = lax.bitcast_convert_type(magnitudes, wide) / unit
    masks = [
        ~is_some,
        numbers > infinite,
        numbers == infinite,
        is_some & (numbers < smallest),
        numbers == limit,
        jnp.zeros(array.shape, bool) if lost is None else lost,
    ]
    count = jnp.int32 if math.prod(array.shape) < 2**31 else jnp.float32
    added = [shares * shares, *(mask.astype(count) for mask in masks)]
    sums = jnp.stack([one.astype(wide) for one in reduced(added, [lax.add] * len(added))])
    return jnp.concatenate([maxima, lax.psum(sums, axes) if axes else sums])


def _units(wide: np.dtype) -> tuple[Any, Any]:
    """Returns the least and largest number that has a normal inverse: devices may multiply by it,
    and flush it to 0.
    """
    tiny = np.finfo(wide).tiny
    return tiny, wide.type(0.5) / tiny


def named(found: np.ndarray, sizes: np.ndarray, dtype: DTypeLike) -> dict[str, np.ndarray]:
    """Returns the numbers of a row by the names that records have.

    Args:
      found: (values, ..., len(STATISTICS)), of the values of a row.
      sizes: (values,), their numbers of elements.
      dtype: of the values.

    Returns:
      arrays (...) of float64, of all values together.
    """
    found = np.moveaxis(np.asarray(found, np.float64), -1, 0)
    of = dict(zip(STATISTICS, found, strict=True))
    sizes = np.reshape(np.asarray(sizes, np.float64), (-1, *[1] * (found.ndim - 2)))
    wide = np.dtype("float64" if dtype in (np.float64, np.complex128) else "float32")
    least, most = map(float, _units(wide))
    unit = np.clip(of["largest"], least, most)
    finite = np.maximum((sizes - of["nan"] - of["inf"]).sum(0), 1)
    return {
        "largest": of["largest"].max(0),
        "mean_square": (unit**2 * of["squares"]).sum(0) / finite,
        "smallest": _smallest(of["inverse_smallest"].max(0), wide),
        **{name: of[name].sum(0) / np.maximum(sizes.sum(0), 1) for name in COUNTS},
    }


def _smallest(inverse: np.ndarray, wide: np.dtype) -> np.ndarray:
    whole = np.dtype(f"uint{8 * wide.itemsize}")
    bits = wide.type(np.inf).view(whole) - inverse.astype(wide).view(whole)
    return np.where(inverse > 0, bits.view(wide).astype(np.float64), 0.0)

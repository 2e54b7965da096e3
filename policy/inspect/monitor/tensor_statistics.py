"""Statistics of one array, computed on its device: magnitudes, and shares outside of dtypes.

Magnitudes are compared by their bits, which are exact where a device flushes subnormal numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.compare.statistics import reduced

STATISTICS = (
    *("largest", "inverse_smallest", "examples_left", "last_example"),
    *("squares", "zeros", "nan", "inf", "below", "above"),
    *("below_float16", "above_float16", "below_float8_e4m3fn", "above_float8_e4m3fn"),
    *("below_float8_e5m2", "above_float8_e5m2", "below_int8", "lost"),
)
"""The numbers of an array, in the order of `statistics_of`."""
_PLACES = {name: i for i, name in enumerate(STATISTICS)}
COUNTS_NOT_FINITE = [_PLACES["nan"], _PLACES["inf"]]
_MAXIMA = 4  # of them, at the start


class Bits(NamedTuple):
    """The magnitudes of an array, as unsigned integers in the same order.

    Attributes:
      numbers: uint32 or uint64, the bits of the array upcast to `wide`, without signs.
      wide: float32, or float64 for float64.
    """

    numbers: Any
    wide: np.dtype

    def of(self, number: float) -> Any:
        """Returns the bits of a positive number."""
        return self.wide.type(number).view(self.numbers.dtype)


def bits_of(array: Any) -> Bits:
    """Returns the magnitudes of a floating array."""
    if array.dtype == jnp.float64:
        return Bits(
            lax.bitcast_convert_type(array, jnp.uint64) & np.uint64(2**63 - 1), np.dtype("float64")
        )
    if array.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    else:
        bits = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
    return Bits(bits & np.uint32(2**31 - 1), np.dtype("float32"))


@functools.cache
def limits(dtype: DTypeLike) -> tuple[float, float]:
    """Returns the largest magnitude that rounds to 0 in a dtype, and the least that overflows."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    # half an ulp above the largest is a tie, which may be rounded to the largest
    tie = largest + float(info.eps) * 2.0 ** (math.frexp(largest)[1] - 1) / 2
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.float32(tie).astype(dtype).astype(np.float32))
    above = float(np.nextafter(np.float32(tie), np.float32(np.inf))) if is_finite else tie
    return float(info.smallest_subnormal) / 2, above


def narrower(dtype: DTypeLike) -> tuple[str, ...]:
    """Returns the float dtypes of `STATISTICS` with a narrower range than a dtype."""
    if np.dtype(dtype).itemsize == 1:
        return ()
    eight_bits = ("float8_e4m3fn", "float8_e5m2")
    return eight_bits if dtype == np.float16 else ("float16", *eight_bits)


@functools.partial(jax.jit, static_argnames="axes")
def statistics_of(array: Any, axes: tuple[str, ...] = (), lost: Any = None) -> Any:
    """Returns `STATISTICS` of an array, as a float32 vector, float64 for float64.

    A complex array is measured as its real and imaginary parts.

        largest            the largest finite magnitude.
        inverse_smallest   the bits of infinity minus those of the least non-zero magnitude, as a
                           number; 0 if there is none. It is larger for a smaller one.
        examples_left      the number of rows, along the first axis, from the first with a number
                           that is not finite.
        last_example       the place of the last such row, from 1; 0 if there is none.
        squares            sum of the squares of the finite values over `largest`, which is taken
                           as one whose inverse is normal.
        zeros, nan, inf    counts of elements.
        below, above       counts of subnormal elements, and of those at the dtype's largest number.
        below_*, above_*   counts of finite elements that a cast would make zero, or infinite or
                           NaN; for int8 with a scale of largest / 127.
        lost               count of the elements that are True in `lost`.

    Args:
      array: floating or complex, of any shape.
      axes: mesh axes over which each device has its own part.
      lost: booleans of the array's shape, or None.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([lax.real(array), lax.imag(array)])
    bits = bits_of(array)
    infinite = bits.of(np.inf)
    numbers, is_finite = bits.numbers, bits.numbers < infinite
    none = numbers.dtype.type(0)
    inverse = jnp.where((numbers > 0) & is_finite, infinite - numbers, none)
    rows = array.shape[0] if array.ndim else 1
    place = lax.broadcasted_iota(numbers.dtype, array.shape, 0) if array.ndim else none
    places = [jnp.where(is_finite, none, one) for one in (rows - place, place + none.dtype.type(1))]
    found = [jnp.where(is_finite, numbers, none), inverse, *places]
    maxima = jnp.stack(reduced(found, [lax.max] * len(found)))
    if axes:
        maxima = lax.pmax(maxima, axes)
    places = [one.astype(bits.wide) for one in maxima[2:]]
    maxima = [*lax.bitcast_convert_type(maxima[:2], bits.wide), *places]
    masks = _masks(array.dtype, bits, maxima[0])
    masks["lost"] = jnp.zeros(array.shape, bool) if lost is None else lost
    unit = jnp.clip(maxima[0], *_units(bits.wide))
    shares = jnp.where(is_finite, lax.bitcast_convert_type(numbers, bits.wide) / unit, 0)
    count = jnp.int32 if math.prod(array.shape) < 2**31 else jnp.float32
    added = [shares * shares, *(mask.astype(count) for mask in masks.values())]
    found = reduced(added, [lax.add] * len(added))
    sums = jnp.stack([one.astype(bits.wide) for one in found])
    if axes:
        sums = lax.psum(sums, axes)
    counts = dict(zip(("squares", *masks), sums, strict=True))
    zero = jnp.zeros((), bits.wide)
    return jnp.stack([*maxima, *(counts.get(name, zero) for name in STATISTICS[_MAXIMA:])])


def _units(wide: np.dtype) -> tuple[Any, Any]:
    """Returns the least and largest number that has a normal inverse: devices may multiply by it,
    and flush it to 0.
    """
    tiny = np.finfo(wide).tiny
    return tiny, wide.type(0.5) / tiny


def _masks(dtype: Any, bits: Bits, largest: Any) -> dict[str, Any]:
    """Returns the counted elements by name."""
    numbers, infinite, info = bits.numbers, bits.of(np.inf), jnp.finfo(dtype)
    is_finite, is_some = numbers < infinite, numbers > 0
    masks = {
        "zeros": ~is_some,
        "nan": numbers > infinite,
        "inf": numbers == infinite,
        "below": is_some & (numbers < bits.of(float(info.smallest_normal))),
        "above": numbers == bits.of(float(info.max)),
    }
    for name in narrower(dtype):
        below, above = map(bits.of, limits(getattr(jnp, name)))
        masks[f"below_{name}"] = is_some & (numbers <= below)
        masks[f"above_{name}"] = is_finite & (numbers >= above)
    if np.dtype(dtype).itemsize > 1:
        half_step = lax.bitcast_convert_type(largest / 254, numbers.dtype)
        masks["below_int8"] = is_some & (numbers <= half_step)
    return masks


def named(
    found: np.ndarray, sizes: np.ndarray, dtype: DTypeLike, more: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Returns the numbers of a row by the names that records have.

    Args:
      found: (values, ..., len(STATISTICS)), of the values of a row.
      sizes: (values,), their numbers of elements.
      dtype: of the values.
      more: names of `STATISTICS` that are counts, whose shares are returned too.

    Returns:
      arrays (...) of float64, of all values together.
    """
    found = np.moveaxis(np.asarray(found, np.float64), -1, 0)
    of = dict(zip(STATISTICS, found, strict=True))
    sizes = np.reshape(np.asarray(sizes, np.float64), (-1, *[1] * (found.ndim - 2)))
    total = np.maximum(sizes.sum(0), 1)
    wide = np.float64 if dtype in (np.float64, np.complex128) else np.float32
    least, most = map(float, _units(np.dtype(wide)))
    unit = np.clip(of["largest"], least, most)
    finite = np.maximum((sizes - of["nan"] - of["inf"]).sum(0), 1)
    numbers = {
        "largest": of["largest"].max(0),
        "mean_square": (unit**2 * of["squares"]).sum(0) / finite,
        "smallest": _smallest(of["inverse_smallest"].max(0), wide),
    }
    shown = ["zeros", "nan", "inf", "below", "above"]
    shown += [f"{side}_{name}" for name in narrower(dtype) for side in ("below", "above")]
    shown += [*(["below_int8"] if np.dtype(dtype).itemsize > 1 else []), *more]
    return numbers | {name: of[name].sum(0) / total for name in shown}


def _smallest(inverse: np.ndarray, wide: Any) -> np.ndarray:
    whole = np.uint64 if wide is np.float64 else np.uint32
    bits = wide(np.inf).view(whole) - inverse.astype(wide).view(whole)
    return np.where(inverse > 0, bits.view(wide).astype(np.float64), 0.0)


def examples_of(found: np.ndarray, rows: int) -> list[int] | None:
    """Returns the first and last of the rows with a number that is not finite.

    Args:
      found: (..., len(STATISTICS)).
      rows: their number.
    """
    left, last = (
        int(found[..., _PLACES[name]].max()) for name in ("examples_left", "last_example")
    )
    return [rows - left, last - 1] if last else None

"""Arrays as quantized values and scales: their type, the formats of values, and magnitudes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as quantized values times scales.

    Attributes:
      qvalue: the array divided by its scales, in a dtype of 8 or fewer bits.
      scale: of the rank of `qvalue`, with one number for each part of the array that shares a
        scale.
      outer: float32 (), another scale of the whole array, or None.
      codec: the format, a part of the tree's structure, or None where the dtypes say it.
    """

    qvalue: Any
    scale: Any
    outer: Any = None
    codec: Hashable = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the quantized values."""
        return self.qvalue.shape


def largest_magnitude(x: Array, largest: Callable[[Array], Array]) -> Array:
    """Returns the largest magnitudes of a float32.

    They are NaN where there is one: XLA's maximum of floats leaves NaN out on CPUs. Bits of floats
    that are not negative have the order of the floats, and those of NaN come last.

    Args:
      largest: the maximum, of int32 that are not negative.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(largest(bits), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Codec:
    """A format of quantized values, which are in units of their scale.

    Attributes:
      dtype: of the values; two of 4 bits take one byte.
      lowest, highest: the range of the values.
      table: the numbers that the values stand for; None of values that are numbers themselves.
      block: the default number of values with one scale, or None for all along the axis.
      has_minimum: whether a block has its minimum beside its scale, which values are counted from.
    """

    dtype: Any
    lowest: float
    highest: float
    table: tuple[float, ...] | None = None
    block: int | None = None
    has_minimum: bool = False

    @property
    def largest(self) -> float:
        """The number that the largest magnitude of a block is scaled to.

        Of int4 it is the lowest value, and the scale has the sign that takes the number there, as
        in llama.cpp's Q4_0.
        """
        return self.lowest if -self.lowest > self.highest else self.highest

    @property
    def stored(self) -> np.dtype:
        """The dtype in memory: of float8 that of its bits, so that arithmetic on them is seen."""
        return np.dtype(jnp.uint8 if self.dtype == jnp.float8_e4m3fn else self.dtype)

    def nearest(self, x: Array) -> Array:
        """Returns the values nearest to float32 numbers, and the even ones of ties."""
        if self.table is not None:
            table = np.asarray(self.table, np.float32)
            between = (table[1:] + table[:-1]) / 2
            above = sum((x > float(each)).astype(jnp.int32) for each in between)
            return jnp.asarray(above).astype(self.dtype)
        if jnp.issubdtype(self.dtype, jnp.integer):
            x = jnp.round(x)
        x = jnp.minimum(jnp.maximum(x, self.lowest), self.highest)
        if self.dtype == jnp.float4_e2m1fn:
            x = _rounded(x, self.dtype)
        return x.astype(self.dtype)


@functools.cache
def codec_of(dtype: np.dtype) -> Codec:
    """Returns the format of numbers of a dtype, of a range that is even."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    return Codec(dtype, -largest, largest)


def _rounded(x: Array, dtype: DTypeLike) -> Array:
    """Returns float32 numbers rounded to the nearest ones of a dtype, and ties to even.

    XLA's cast to float4_e2m1fn may round to float16 before.
    """
    info = jnp.finfo(dtype)
    exponent = lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 23  # biased by 127
    exponent = jnp.maximum(exponent, 127 + int(info.minexp)) - info.nmant
    step = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.round(x / step) * step

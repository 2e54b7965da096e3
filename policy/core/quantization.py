"""Arrays as quantized values and scales: their type, magnitudes of scales, and rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
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


def nearest_values(
    x: Array, dtype: DTypeLike, largest: float, smallest: float | None = None
) -> Array:
    """Clips float32 numbers to codes, and rounds them to integers; other codes a cast rounds to.

    Args:
      x: in units of the scale.
      dtype: of the codes, which the caller casts to.
      largest, smallest: the range; None is ``-largest``.
    """
    rounded = jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x
    return jnp.clip(rounded, -largest if smallest is None else smallest, largest)

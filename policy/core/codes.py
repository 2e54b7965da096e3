"""Codes of arrays: the largest magnitudes that scales are of, and numbers rounded to codes."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def largest_magnitude(x: Array, largest: Callable[[Array], Array]) -> Array:
    """Returns the largest magnitudes of a float32.

    They are NaN where there is one: XLA's maximum of floats leaves NaN out on CPUs. Bits of floats
    that are not negative have the order of the floats, and those of NaN come last.

    Args:
      largest: the maximum, of int32 that are not negative.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(largest(bits), jnp.float32)


def nearest_codes(
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

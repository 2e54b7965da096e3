"""Standard dtype promotion for Flax's code, where it mixes dtypes that strict promotion would
refuse.
"""

from __future__ import annotations

import contextlib

import jax


def mixing_allowed(allowed: bool = True) -> contextlib.AbstractContextManager[object]:
    """Puts JAX's standard promotion in force for a block, or with `allowed=False` leaves promotion
    as it is.
    """
    return jax.numpy_dtype_promotion("standard") if allowed else contextlib.nullcontext()

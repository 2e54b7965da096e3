"""Dtypes of abstract values. They are asked for of every value of every equation: cached."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

F32 = np.dtype(np.float32)


@functools.cache
def is_floating_dtype(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is a real floating one."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.cache
def is_half(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is floating and narrower than float32."""
    return is_floating_dtype(dtype) and np.dtype(dtype).itemsize < F32.itemsize


def holds_half(aval: Any) -> bool:
    """Returns whether an array, or an abstract value, has such a dtype."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and is_half(dtype)


def float_dtype(aval: Any) -> np.dtype | None:
    """Returns the floating dtype of an abstract value, or None."""
    dtype = getattr(aval, "dtype", None)
    return dtype if dtype is not None and is_floating_dtype(dtype) else None

"""Dtypes of abstract values. They are asked for of every value of every equation: cached."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

F32 = np.dtype(np.float32)
HALVES = frozenset(("bfloat16", "float16"))
WIDES = frozenset(("float32", "float64"))


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
    return is_half(getattr(aval, "dtype", np.bool_))


def float_dtype(aval: Any) -> np.dtype | None:
    """Returns the floating dtype of an abstract value, or None."""
    dtype = getattr(aval, "dtype", None)
    return dtype if dtype is not None and is_floating_dtype(dtype) else None


def dtype_name_of(atom: Any) -> str:
    """Returns the name of the dtype of a variable or literal; "" if it has none."""
    return dtype_name(getattr(getattr(atom, "aval", None), "dtype", None))


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: DTypeLike) -> str:
    """Returns the name of a dtype, also of one for random keys; "" for None."""
    return "" if dtype is None else str(dtype)


@functools.cache
def is_inexact_name(dtype: str) -> bool:
    """Returns whether the dtype of a name is floating or complex."""
    return dtype.startswith(("float", "bfloat", "complex"))


def is_eight_bits(dtype: Any) -> bool:
    """Returns whether a dtype, or that of a name, is int8 or a float of 8 bits at most."""
    return str(dtype) == "int8" or str(dtype).startswith(("float8", "float4"))


def explicit_sharding(aval: Any) -> Any:
    """Returns the sharding of an array where all axes of its mesh are explicit, otherwise None."""
    sharding = getattr(aval, "sharding", None)
    is_explicit = (
        sharding is not None and not sharding.mesh.empty and sharding.mesh.are_all_axes_explicit
    )
    return sharding if is_explicit else None

"""Casts of trees. They touch floating arrays only, and never an array that has the dtype already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")


def require_available(dtype: DTypeLike) -> np.dtype:
    """`dtype` itself, refused where JAX would silently make something narrower of it.

    Raises:
      ValueError: float64 while x64 is disabled.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"A policy asks for {dtype.name}, but JAX runs with x64 disabled and would silently use float32. "
            "Call jax.config.update('jax_enable_x64', True) first, or choose float32."
        )
    return dtype


def is_floating(x: Any) -> bool:
    """Whether `x` is a floating array: a JAX array or tracer, a NumPy array or scalar, or a `ShapeDtypeStruct`."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) and jnp.issubdtype(
        x.dtype, jnp.floating
    )


def cast_array(x: Any, dtype: DTypeLike, *, complex_too: bool = False) -> Any:
    """`x` in `dtype` where `x` is a floating array, else `x` itself.

    With `complex_too`, a complex array is cast to the complex dtype whose parts are as wide as `dtype`, at least
    complex64 (JAX has no narrower one).
    """
    if not is_floating(x):
        if not (complex_too and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)):
            return x
        dtype = jnp.complex128 if jnp.dtype(dtype).itemsize == 8 else jnp.complex64
    if x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype), weak_type=False)
    return x.astype(dtype)


def cast_floating(
    tree: T, dtype: DTypeLike, *, is_leaf: Callable[[Any], bool] | None = None, complex_too: bool = False
) -> T:
    """Casts the floating arrays of a tree to `dtype`.

    Integers, booleans, PRNG keys, complex numbers (unless `complex_too`) and everything that is not an array pass
    through as they are, and so does an array that has the dtype already. `is_leaf` stops the walk, as in
    `jax.tree.map`: what it stops at is returned by identity unless it is itself a floating array.

    Raises:
      ValueError: `dtype` is float64 while x64 is disabled.
    """
    dtype = require_available(dtype)
    return jax.tree.map(lambda x: cast_array(x, dtype, complex_too=complex_too), tree, is_leaf=is_leaf)

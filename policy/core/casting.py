"""Casts of trees. Only floating arrays are cast, and only if they have another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")


def require_available(dtype: DTypeLike) -> np.dtype:
    """Returns `dtype` as a NumPy dtype, or raises if JAX would silently narrow it.

    Raises:
      ValueError: `dtype` is float64 while x64 is disabled.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"A policy asks for {dtype.name}, but JAX runs with x64 disabled and would silently "
            "use float32. "
            "Call jax.config.update('jax_enable_x64', True) first, or choose float32."
        )
    return dtype


def is_floating(x: Any) -> bool:
    """Returns whether `x` is a floating array.

    Arrays are JAX arrays and tracers, NumPy arrays and scalars, and `ShapeDtypeStruct`s.
    """
    return isinstance(
        x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    ) and jnp.issubdtype(x.dtype, jnp.floating)


def cast_array(x: Any, dtype: DTypeLike, *, complex_too: bool = False) -> Any:
    """Casts `x` to `dtype` if it is a floating array; returns other values unchanged.

    With `complex_too`, complex arrays are cast to the complex dtype whose parts have the width of
    `dtype`, but at least to complex64, the narrowest that JAX has.
    """
    if not is_floating(x):
        if not (
            complex_too and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)
        ):
            return x
        dtype = jnp.complex128 if jnp.dtype(dtype).itemsize == 8 else jnp.complex64
    if x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(dtype), weak_type=False)
    return x.astype(dtype)


def cast_floating(
    tree: T,
    dtype: DTypeLike,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    complex_too: bool = False,
) -> T:
    """Casts the floating arrays of a tree to `dtype`.

    Integers, booleans, PRNG keys, complex numbers (unless `complex_too`), non-arrays and arrays
    that already have the dtype are returned unchanged.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> tree = policy.cast_floating({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.bfloat16)
    >>> tree["w"].dtype, tree["step"].dtype
    (dtype(bfloat16), dtype('int32'))

    Args:
      tree: a tree; arrays may be `jax.ShapeDtypeStruct`.
      dtype: a floating dtype.
      is_leaf: stops the walk as in `jax.tree.map`. The nodes it stops at are returned by identity
        unless they are floating arrays themselves.
      complex_too: whether complex arrays are cast, to the complex dtype with parts of that width;
        complex64 is the narrowest.

    Returns:
      A tree of the same structure and shapes.

    Raises:
      ValueError: `dtype` is float64 while x64 is disabled.
    """
    dtype = require_available(dtype)
    return jax.tree.map(
        lambda x: cast_array(x, dtype, complex_too=complex_too), tree, is_leaf=is_leaf
    )

"""Keys and values as the cache of an attention stores them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from policy.core.dtypes import cache_dtype_of
from policy.core.quantization import Quantized
from policy.core.scope import current_policy
from policy.eight_bits.quantization import quantize, undifferentiable
from policy.programs import marks

_NO_DERIVATIVE = (
    "A cache of keys and values in 8 bits has no derivative, because its codes are rounded. "
    "Differentiate a call that does not decode, or decode under a policy without cache=."
)


def quantize_cache(x: Array, dtype: DTypeLike | None = None) -> Array | Quantized:
    """Returns keys or values as a cache stores them.

    The scale of an 8-bit cache is the largest magnitude of a head at a position divided by 127, and
    for float8 the power of two at or above its quotient by 448. It is rounded up to bfloat16 before
    codes are taken, which widens the step between codes by 1/128 at most. Codes and scale have the
    axes of `x`, so one indexed update writes both.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> new = policy.quantized.quantize_cache(jnp.array([[2.54, -1.0]]), "int8")
    >>> new.qvalue, new.scale.dtype
    (Array([[127, -50]], dtype=int8), dtype(bfloat16))
    >>> cache = policy.quantized.quantize_cache(jnp.zeros((4, 2)), "int8")
    >>> cache = jax.tree.map(lambda held, x: held.at[1:2].set(x), cache, new)

    Args:
      x: (..., head width), floating.
      dtype: int8, "float8", bfloat16, float16 or float32. None is the cache_dtype of the policy in
        force, else its compute_dtype, and without a policy the dtype of `x`.

    Returns:
      In 8 bits a pytree with `qvalue`, of the shape of `x`, and bfloat16 `scale`, (..., 1); else an
      array. The attention functions of `mpmodules` take both as keys and values. In 8 bits there is
      no derivative: taking one raises a NotImplementedError.

    Raises:
      ValueError: `dtype` is none of a cache.
    """
    policy = current_policy()
    dtype = cache_dtype_of(dtype)
    if dtype is None:
        dtype = x.dtype if policy is None else policy.cache_dtype or policy.compute_dtype
    if dtype.itemsize > 1:
        return x.astype(dtype)
    with marks.layer():  # autocast leaves it as it is
        x = undifferentiable(_NO_DERIVATIVE, x)
        return quantize(x, (x.ndim - 1,), dtype, scale_dtype=jnp.bfloat16)

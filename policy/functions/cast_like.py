"""A cast whose cotangent is float32 before `jax.vmap` sums it.

A parameter that is cast to half precision inside of `jax.vmap`, and then meets a mapped array, gets
its cotangent summed over the mapped axis in half precision: JAX broadcasts the cast parameter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from policy.programs.dtypes import explicit_sharding


def cast_like(x: Array, like: Array) -> Array:
    """Casts `x` to the dtype of `like`, and broadcasts it first along the axes of `jax.vmap`.

    It is linear in `x`. Nothing is read of `like` but its dtype, and which axes are mapped.

    >>> import jax, jax.numpy as jnp
    >>> def loss(bias, y):
    ...     return jnp.sum(jax.vmap(lambda y: y + cast_like(bias, y))(y), dtype=jnp.float32)
    >>> jax.grad(loss)(jnp.zeros(()), jnp.ones(1025, jnp.bfloat16))  # 1024 with bias.astype
    Array(1025., dtype=float32)

    Args:
      x: floating, any shape.
      like: floating, any shape: what the result meets.
    """
    return _cast_like_p.bind(x, like)


def _cast(x: Array, like: Array) -> Array:
    return lax.convert_element_type(x, like.dtype)


def _transpose(cotangent: Any, x: Any, like: Any) -> list[Any]:
    del like
    dtype = (x.aval if ad.is_undefined_primal(x) else x).dtype
    is_zero = isinstance(cotangent, ad.Zero)
    return [None if is_zero else lax.convert_element_type(cotangent, dtype), None]


def _batched(arrays: tuple[Array, Array], axes: tuple[Any, Any]) -> tuple[Array, Any]:
    (x, like), (of_x, of_like) = arrays, axes
    if of_like is None:
        return _cast(x, like), of_x
    like = jnp.moveaxis(like, of_like, 0)
    x = _repeated(x, like) if of_x is None else jnp.moveaxis(x, of_x, 0)
    return cast_like(x, like), 0


def _repeated(x: Array, like: Array) -> Array:
    """Broadcasts `x` along a new first axis, sharded as that of `like`."""
    sharding = explicit_sharding(jax.typeof(like))
    if sharding is not None:
        spec = PartitionSpec(sharding.spec[0], *jax.typeof(x).sharding.spec)
        sharding = sharding.update(spec=spec)
    return jnp.broadcast_to(x, (len(like), *x.shape), out_sharding=sharding)


_cast_like_p = jex_core.Primitive("cast_like")
_cast_like_p.def_impl(_cast)
_cast_like_p.def_abstract_eval(lambda x, like: x.update(dtype=like.dtype, weak_type=False))
ad.deflinear2(_cast_like_p, _transpose)
batching.primitive_batchers[_cast_like_p] = _batched
mlir.register_lowering(_cast_like_p, mlir.lower_fun(_cast, multiple_results=False))

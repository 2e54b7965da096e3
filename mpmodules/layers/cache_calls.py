"""The cache of an attention that decodes, alike in both APIs: keys and values in a policy's
cache_dtype, written a position at a time.

Flax's layer runs as one that does not decode, and its `attention_fn` is the one made here. The
names of Flax's variables are kept; scales stand beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.policy import Policy
from policy.core.quantization import Quantized
from policy.eight_bits.caches import quantize_cache

Array = jax.Array
Held = Array | Quantized

_KEY, _VALUE, _INDEX = "cached_key", "cached_value", "cache_index"
_SCALE = "_scale"


class Variables(Protocol):
    """The variables of a layer's cache."""

    def has(self, name: str) -> bool:
        """Returns whether there is one of that name."""
        ...

    def read(self, name: str) -> Array:
        """Returns its array."""
        ...

    def write(self, name: str, array: Array) -> None:
        """Replaces its array, or makes it."""
        ...


def own_cache_dtype(policy: Policy | None, dtype: DTypeLike | None) -> np.dtype | None:
    """Returns the dtype of a cache that Flax's own code does not keep: other than compute_dtype.

    Args:
      policy: the layer's.
      dtype: that the layer computes in; a policy's cache_dtype holds for no complex one.
    """
    cache = None if policy is None else policy.cache_dtype
    if cache is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    return None if cache == dtype else cache


def _check_cache(variables: Variables, policy: Policy | None, dtype: np.dtype, where: str) -> None:
    """Rejects a cache in another dtype than a policy's."""
    if policy is None or not variables.has(_KEY):
        return
    found = variables.read(_KEY).dtype
    if found != dtype or (dtype.itemsize == 1 and not variables.has(_KEY + _SCALE)):
        without = " without scales" if found == dtype else ""
        raise ValueError(
            f"{where}: its cache is in {found}{without}, but under '{policy}' it is in {dtype}. "
            "Make the cache under that policy, by init in linen and init_cache in nnx, or give the "
            "policy another cache=."
        )


def make_cache(variables: Variables, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Makes an empty cache of a shape (batch..., length, key heads, head width)."""
    for name in (_KEY, _VALUE):
        _write(variables, name, quantize_cache(jnp.zeros(shape), dtype))
    variables.write(_INDEX, jnp.array(0, dtype=jnp.int32))


def decoding(
    attention_fn: Callable[..., Array],
    ours: Callable[..., Array],
    variables: Variables,
    policy: Policy | None,
    computes_in: DTypeLike | None,
    *,
    where: str | None,
) -> Callable[..., Array] | None:
    """Returns an attention function for a query, key and value of one position, which writes key
    and value to the cache and attends to those written so far; None where Flax's own code keeps
    the cache.

    Where there is no cache yet, one of the key's length is made, and the call is not of a position.

    Args:
      attention_fn: the layer's, which computes the attention.
      ours: the function that takes `Quantized` keys and values; others get upcast ones.
      variables: of the cache.
      policy: the layer's.
      computes_in: the dtype that the layer computes in.
      where: names the layer in the message on a cache in another dtype; None checks none.

    Raises:
      ValueError: the cache is in another dtype than the policy's.
    """
    own = own_cache_dtype(policy, computes_in)
    if where is not None:
        _check_cache(variables, policy, own or jnp.dtype(computes_in), where)
    if own is None:
        return None
    dtype, function = own, attention_fn
    while isinstance(function, functools.partial):
        function = function.func

    @functools.wraps(attention_fn)
    def attend(query: Array, key: Array, value: Array, *args: Any, **kwargs: Any) -> Array:
        if not variables.has(_KEY):
            make_cache(variables, key.shape, dtype)
            return attention_fn(query, key, value, *args, **kwargs)
        index = variables.read(_INDEX)
        held = [
            _put(variables, name, x, index, dtype) for name, x in ((_KEY, key), (_VALUE, value))
        ]
        variables.write(_INDEX, index + 1)
        if "mask" in kwargs:
            length = variables.read(_KEY).shape[-3]
            written = jnp.broadcast_to(jnp.arange(length) <= index, (*key.shape[:-3], 1, 1, length))
            kwargs["mask"] = flax_nn.combine_masks(kwargs["mask"], written, dtype=jnp.bool_)
        if "is_causal" in kwargs:  # the mask has it: the query is the last position written
            kwargs["is_causal"] = False
        if not (function is ours and isinstance(held[0], Quantized)):
            held = [_widened(x, query.dtype) for x in held]
        return attention_fn(query, *held, *args, **kwargs)

    return attend


def _put(variables: Variables, name: str, x: Array, index: Array, dtype: np.dtype) -> Held:
    """Writes keys or values of a position to the cache, and returns the whole."""
    held = variables.read(name)
    expected = (*held.shape[:-3], 1, *held.shape[-2:])
    if x.shape != expected:
        raise ValueError(
            f"Autoregressive cache shape error, expected key shape {expected} instead got "
            f"{x.shape}."
        )
    if dtype.itemsize == 1:
        held = Quantized(held, variables.read(name + _SCALE))

    def put(held: Array, new: Array) -> Array:  # float32 may stand for half precision
        return lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), index, axis=-3)

    held = jax.tree.map(put, held, quantize_cache(x, dtype))
    _write(variables, name, held)
    return held


def _write(variables: Variables, name: str, held: Held) -> None:
    variables.write(name, held.qvalue if isinstance(held, Quantized) else held)
    if isinstance(held, Quantized):
        variables.write(name + _SCALE, held.scale)


def _widened(held: Held, dtype: DTypeLike) -> Array:
    if not isinstance(held, Quantized):
        return held.astype(dtype)
    return (held.qvalue.astype(jnp.float32) * held.scale.astype(jnp.float32)).astype(dtype)

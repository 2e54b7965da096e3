"""Attention layers: projections and weighted sums in compute_dtype, logits and softmax in
reduction_dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from jax.typing import DTypeLike

from mpmodules.calls.boundary import Crossing
from mpmodules.functions import attention
from mpmodules.functions.functional import complex_input
from mpmodules.layers.attention_calls import ATTENTION
from mpmodules.layers.cache_calls import decoding, make_cache, own_cache_dtype
from mpmodules.nnx._layer import BuiltWithDtypes
from mpmodules.nnx._layers.dot_product_attention import dot_product_attention
from mpmodules.nnx._resolution import viewed
from policy.eight_bits.quantization import shared_operands

_wraps: Any = functools.wraps  # typed, it would hide that a method is one


class MultiHeadAttention(BuiltWithDtypes, flax_nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` that obeys policies.

    Projections and the weighted sum of values run in compute_dtype, logits and softmax in
    reduction_dtype, with dropout, sown weights, masks, grouped queries and decoding alike. An
    `attention_fn` of the user's own is obeyed.

    Example:
      >>> with use_policy("p=f32,c=bf16"):
      ...     layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> y = layer(jnp.ones((1, 5, 8)))
      >>> y.shape, y.dtype, layer.query.kernel[...].dtype
      ((1, 5, 8), dtype(bfloat16), dtype('float32'))
    """

    _adopts_children: ClassVar[bool] = True
    _crossing: ClassVar[Crossing] = ATTENTION

    def _policy_arguments(
        self, upstream_init: Callable[..., None], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        if kwargs.get("attention_fn") in (None, flax_nnx.dot_product_attention):
            return kwargs | {"attention_fn": dot_product_attention}
        return kwargs

    @_wraps(flax_nnx.MultiHeadAttention.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # It may decode in x64 mode, and projects one input.
        decodes = self.decode if kwargs.get("decode") is None else kwargs["decode"]
        layer: Any = self
        if (
            decodes
            and self.cached_key is not None
            and complex_input((*args, *kwargs.values())) is None
        ):
            layer, kwargs = self._decoding(kwargs)
        with attention.adding_indices(bool(decodes)), shared_operands():
            return flax_nnx.MultiHeadAttention.__call__(layer, *args, **kwargs)

    def _decoding(self, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the layer and the arguments of a call that decodes for Flax's code, which keeps
        the cache itself where that is in compute_dtype.
        """
        attend = decoding(
            self.attention_fn,
            dot_product_attention,
            _Variables(self),
            self.dtype_policy,
            self.dtype,
            where=type(self).__name__,
        )
        if attend is None:
            return self, kwargs

        def sowing(*args: Any, module: Any = None, **kwargs: Any) -> Any:  # in it, not in a view
            return attend(*args, module=None if module is None else self, **kwargs)

        return viewed(self, attention_fn=sowing), kwargs | {"decode": False}

    def init_cache(self, input_shape: Any, dtype: DTypeLike | None = None) -> None:
        """Makes an empty cache, as Flax's `init_cache` does, in cache_dtype, or in float32 with no
        policy, unless `dtype` is given. One in 8 bits has scales, `cached_key_scale` and
        `cached_value_scale`.

        Args:
          input_shape: (batch..., length, features).
          dtype: of the cache.
        """
        own = own_cache_dtype(self.dtype_policy, self.dtype)
        dtype = jnp.dtype(dtype or own or self.dtype or jnp.float32)
        super().init_cache(input_shape, dtype)
        for name in ("cached_key_scale", "cached_value_scale"):
            if hasattr(self, name):
                delattr(self, name)
        if dtype.itemsize == 1:
            shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
            make_cache(_Variables(self), shape, dtype)


class _Variables:
    """The cache of an nnx layer."""

    def __init__(self, module: Any):
        self.module = module

    def has(self, name: str) -> bool:
        return getattr(self.module, name, None) is not None

    def read(self, name: str) -> jax.Array:
        return getattr(self.module, name)[...]

    def write(self, name: str, array: jax.Array) -> None:
        if self.has(name):
            getattr(self.module, name)[...] = array
        else:
            setattr(self.module, name, flax_nnx.Cache(array))

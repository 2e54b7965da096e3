"""Attention layers: projections and weighted sums in compute_dtype, logits and softmax in
reduction_dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx as flax_nnx
from jax.typing import DTypeLike

from mpmodules.calls.boundary import Crossing
from mpmodules.functions import attention
from mpmodules.layers.attention_calls import ATTENTION
from mpmodules.nnx._layer import BuiltWithDtypes
from mpmodules.nnx._layers.dot_product_attention import dot_product_attention
from policy.eight_bits.quantisation import shared_operands

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
        with attention.adding_indices(bool(decodes)), shared_operands():
            return flax_nnx.MultiHeadAttention.__call__(self, *args, **kwargs)

    def init_cache(self, input_shape: Any, dtype: DTypeLike | None = None) -> None:
        """Runs Flax's `init_cache` in compute_dtype, or in float32 with no policy, unless `dtype`
        is given.
        """
        if dtype is None:
            dtype = jnp.float32 if self.dtype is None else self.dtype
        super().init_cache(input_shape, dtype)

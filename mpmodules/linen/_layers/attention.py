"""Attention layers: projections and weighted sums in compute_dtype, logits and softmax in
reduction_dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
from jax.typing import DTypeLike

from mpmodules.calls.boundary import Crossing, MethodCall
from mpmodules.functions import attention
from mpmodules.layers.attention_calls import ATTENTION
from mpmodules.layers.cache_calls import decoding
from mpmodules.linen._layers.dot_product_attention import dot_product_attention
from mpmodules.linen._module import Module
from mpmodules.linen._port import adopting_inside
from mpmodules.linen._resolution import declared_field, dtype_fields, viewed, where
from policy.core.policy import Policy
from policy.eight_bits.quantization import shared_operands


class Attention(Module):
    """Base class of attention layers, which count as modules and pass their dtypes to the layers
    that they create.
    """

    param_dtype: DTypeLike | None = None
    attention_fn: Callable[..., Any] = dot_product_attention

    _crossing: ClassVar[Crossing] = ATTENTION
    _dtype_fields: ClassVar[bool] = True

    def _policy_fields(self, policy: Policy | None) -> dict[str, Any]:
        fields = dtype_fields(self, policy)
        if declared_field(self, "attention_fn") is flax_nn.dot_product_attention:
            fields["attention_fn"] = dot_product_attention
        return fields

    def _call_layer(self, call: MethodCall) -> Any:
        fields = self._policy_fields(call.policy)
        if call.effective.dtype is not None:
            fields["dtype"] = call.effective.dtype
        decodes = bool(getattr(self, "decode", False))
        is_complex = call.effective.dtype is not None or call.complex_dtype is not None
        if decodes and call.policy is not None and not is_complex:
            fields |= self._cache_fields(call.policy, fields)
        indices = attention.adding_indices(decodes)
        inside = adopting_inside(self, call)
        with viewed(self, fields) as view, inside, indices, shared_operands():
            return call.run(view)

    def _cache_fields(self, policy: Policy, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of a layer that decodes, where Flax's own code does not keep the cache
        of its policy.
        """
        attend = decoding(
            fields.get("attention_fn", declared_field(self, "attention_fn")),
            dot_product_attention,
            _Variables(self),
            policy,
            fields["dtype"],
            # Flax rejects a cache that is not mutable.
            where=where(self) if self.is_mutable_collection("cache") else None,
        )
        return {} if attend is None else {"decode": False, "attention_fn": attend}


class _Variables:
    """The cache of a linen layer."""

    def __init__(self, module: Any):
        self.module = module

    def has(self, name: str) -> bool:
        return self.module.has_variable("cache", name)

    def read(self, name: str) -> jax.Array:
        return self.module.get_variable("cache", name)

    def write(self, name: str, array: jax.Array) -> None:
        self.module.variable("cache", name, lambda: array).value = array


class MultiHeadDotProductAttention(Attention, flax_nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` that obeys policies.

    Projections and the weighted sum of values run in compute_dtype, logits and softmax in
    reduction_dtype, with dropout, sown weights, masks and decoding alike. An `attention_fn` of the
    user's own is obeyed.

    Example:
      >>> layer = linen.MultiHeadDotProductAttention(num_heads=2, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 5, 8)))
      >>> y.shape, y.dtype, variables["params"]["query"]["kernel"].dtype
      ((1, 5, 8), dtype(bfloat16), dtype('float32'))
    """


class MultiHeadAttention(Attention, flax_nn.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention` that obeys policies; see `MultiHeadDotProductAttention`.

    Example:
      >>> layer = linen.MultiHeadAttention(num_heads=2, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 5, 8)))
      >>> y.shape, y.dtype
      ((1, 5, 8), dtype(bfloat16))
    """


class SelfAttention(Attention, flax_nn.SelfAttention):
    """`flax.linen.SelfAttention` that obeys policies; see `MultiHeadDotProductAttention`.

    Example:
      >>> import warnings
      >>> layer = linen.SelfAttention(num_heads=2, dtype_policy="p=f32,c=bf16")
      >>> with warnings.catch_warnings():  # Flax deprecates this class
      ...     warnings.simplefilter("ignore")
      ...     y, variables = layer.init_with_output(key, jnp.ones((1, 5, 8)))
      >>> y.shape, y.dtype
      ((1, 5, 8), dtype(bfloat16))
    """

"""Attention: projections and weighted sums in compute_dtype, logits and softmax in reduction_dtype, on every path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from mpmodules import attention
from mpmodules.functional import is_half
from mpmodules.fused_attention import fused_kernel
from mpmodules.linen._adoption import layers_inside
from mpmodules.linen._layer import declared_field
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import declared_dtypes, dtype_fields, fields_set
from policy.policy import Policy
from policy.precedence import Effective
from policy.scope import current_policy

_WIDE_WEIGHTS = "force_fp32_for_softmax without a policy"


def dot_product_attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: flax_nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention_weights`, with logits and softmax in reduction_dtype whatever the inputs are.

    Arguments and masks are Flax's. In float32 and wider it is Flax's own function.

    Args:
      query: (batch..., queries, heads, width); `key`: (batch..., keys, key heads, width), where the key heads divide
        the heads (Flax's own function takes equal ones only).

    Returns:
      Weights (batch..., heads, queries, keys) in the inputs' dtype (or `dtype`); with `force_fp32_for_softmax` in
      float32 where no policy holds, as Flax's.

    Raises:
      ValueError: both `einsum` and `precision` or `einsum_dot_general` are given, or a dropout rate without a key.
    """
    dtype = attention.operand_dtype(dtype, query, key)
    query, key = promote_dtype(query, key, dtype=dtype)
    if not is_half(query.dtype) and query.shape[-2] == key.shape[-2]:
        return flax_nn.dot_product_attention_weights(
            query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision,
            module, force_fp32_for_softmax, einsum_dot_general, einsum,
        )  # fmt: skip
    if (precision or einsum_dot_general) and einsum:
        raise ValueError("precision/einsum_dot_general and einsum are mutually exclusive: give only one of them.")
    if einsum_dot_general is not None:
        einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=einsum_dot_general)
    attention.check_shapes(query, key)
    narrow = not force_fp32_for_softmax or current_policy() is not None  # what it asks for is so in any case
    weights = attention.dot_product_attention_weights(
        query,
        key,
        bias=bias,
        mask=mask,
        precision=precision,
        einsum=einsum,
        reduction_dtype=_reduction_dtype(),
        dtype=query.dtype if narrow else None,
    )
    if module:
        module.sow("intermediates", "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        weights = attention.dropout(
            weights, dropout_rate, broadcast=broadcast_dropout, batch_axes=key.ndim - 3, rng=dropout_rng
        )
    return weights


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: flax_nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    implementation: Literal["xla", "cudnn", "splash"] | None = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention`, with logits and softmax in reduction_dtype whatever the inputs are.

    Arguments and masks are Flax's. In float32 and wider it is Flax's own function.

    Args:
      query: (batch..., queries, heads, width); `key` and `value`: (batch..., keys, key heads, width), where the key
        heads divide the heads (Flax's own function takes equal ones only).
      implementation: "cudnn" and "splash" are the fused kernels of NVIDIA GPUs and TPUs, "xla" is neither; None
        chooses (`mpmodules.fused_attention.fused_kernel` says when).

    Returns:
      (batch..., queries, heads, width) in the inputs' dtype (or `dtype`); with `force_fp32_for_softmax` in float32
      where no policy holds, as Flax's.

    Raises:
      ValueError: one of the two einsums without the other, or together with `precision` or `einsum_dot_general`;
        shapes that do not fit; an `implementation` that can't do what is asked for.
    """
    dtype = attention.operand_dtype(dtype, query, key, value)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    obstacles = {
        "dropout": not deterministic and dropout_rate > 0.0,
        "sown weights": module is not None,
        "a precision": precision is not None,
        "an einsum of one's own": einsum_dot_general is not None or qk_attn_weights_einsum is not None,
        _WIDE_WEIGHTS: force_fp32_for_softmax and current_policy() is None,
    }
    fused = fused_kernel(
        implementation, query, key, value, bias=bias, mask=mask, is_causal=False,
        reduction_dtype=_reduction_dtype(), obstacles=obstacles,
    )  # fmt: skip
    if not is_half(query.dtype) and query.shape[-2] == key.shape[-2]:
        return flax_nn.dot_product_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, force_fp32_for_softmax, einsum_dot_general, qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )  # fmt: skip
    if bool(qk_attn_weights_einsum) != bool(attn_weights_value_einsum):
        raise ValueError("qk_attn_weights_einsum and attn_weights_value_einsum must be specified together.")
    if (precision or einsum_dot_general) and qk_attn_weights_einsum:
        raise ValueError(
            "precision/einsum_dot_general and qk_attn_weights_einsum/attn_weights_value_einsum are mutually "
            "exclusive: give only one of them."
        )
    attention.check_shapes(query, key, value)
    if fused is not None:
        return fused(query, key, value)
    if not any(obstacles[name] for name in ("dropout", "sown weights", "an einsum of one's own", _WIDE_WEIGHTS)):
        return attention.dot_product_attention(
            query, key, value, bias=bias, mask=mask, precision=precision, reduction_dtype=_reduction_dtype()
        )
    weights = dot_product_attention_weights(
        query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, None, precision, module,
        force_fp32_for_softmax, einsum_dot_general=einsum_dot_general, einsum=qk_attn_weights_einsum,
    )  # fmt: skip
    if einsum_dot_general is not None:
        attn_weights_value_einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=einsum_dot_general)
    if attn_weights_value_einsum is not None:
        return attn_weights_value_einsum("...hqk,...khd->...qhd", weights, value)
    return attention.weighted_values(weights, value, precision=precision)


def _reduction_dtype() -> Any:
    policy = current_policy()
    return jnp.float32 if policy is None else policy.reduction_dtype


class Attention(Module):
    """Base class of attention layers, which count as modules and pass their dtypes to the layers that they create."""

    _dtype_fields: ClassVar[bool] = True

    def _policy_fields(self, policy: Policy | None, output_dtype: Any, method_name: str) -> dict[str, Any]:
        fields = dtype_fields(self, policy)
        if declared_field(self, "attention_fn") is flax_nn.dot_product_attention:
            fields["attention_fn"] = dot_product_attention
        return fields

    def _call_layer(
        self, effective: Effective, crosses: bool, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        fields = self._policy_fields(effective.policy, None, method.__name__)
        if effective.dtype is not None:
            fields["dtype"] = effective.dtype
        declared = declared_dtypes(self)
        decoding = attention.adding_indices(bool(getattr(self, "decode", False)))
        with fields_set(self, fields), layers_inside(effective.policy, declared), decoding:
            return method(self, *args, **kwargs)


class MultiHeadDotProductAttention(Attention, flax_nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` that obeys policies.

    Projections and the weighted sum of values run in compute_dtype, logits and softmax in reduction_dtype, with
    dropout, sown weights, masks and decoding alike. An `attention_fn` of the user's own is obeyed.
    """

    param_dtype: Any = None
    attention_fn: Callable[..., Any] = dot_product_attention


class MultiHeadAttention(Attention, flax_nn.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention` that obeys policies; see `MultiHeadDotProductAttention`."""

    param_dtype: Any = None
    attention_fn: Callable[..., Any] = dot_product_attention


class SelfAttention(Attention, flax_nn.SelfAttention):
    """`flax.linen.SelfAttention` that obeys policies; see `MultiHeadDotProductAttention`."""

    param_dtype: Any = None
    attention_fn: Callable[..., Any] = dot_product_attention

"""`flax.linen`'s attention functions, with logits and softmax in reduction_dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import PrecisionLike
from jax.typing import DTypeLike

from mpmodules.functions import attention
from mpmodules.functions.functional import is_half
from mpmodules.layers.attention_calls import (
    Dropout,
    kernel_of_call,
    weights_of_call,
    without_weights,
)
from policy.core.scope import current_policy


def dot_product_attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: flax_nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    einsum: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention_weights`, with logits and softmax in reduction_dtype.

    Arguments and masks are Flax's. In float32 and wider it is Flax's own function.

    Args:
      query: (batch..., queries, heads, width).
      key: (batch..., keys, key heads, width), where the key heads divide the heads (Flax's own
        function takes equal ones only).

    Returns:
      Weights (batch..., heads, queries, keys) in the inputs' dtype (or `dtype`); with
      `force_fp32_for_softmax` in float32 where no policy holds, as Flax's.

    Raises:
      ValueError: both `einsum` and `precision` or `einsum_dot_general` are given, or a dropout rate
        without a key.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8), jnp.bfloat16)
      >>> weights = linen.dot_product_attention_weights(x, x)
      >>> weights.shape, weights.dtype
      ((2, 4, 5, 5), dtype(bfloat16))
    """
    positional = (bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    dtype = attention.operand_dtype(dtype, query, key)
    query, key = promote_dtype(query, key, dtype=dtype)
    if not is_half(query.dtype) and query.shape[-2] == key.shape[-2]:
        return flax_nn.dot_product_attention_weights(
            query,
            key,
            *positional,
            dtype,
            precision,
            module,
            force_fp32_for_softmax,
            einsum_dot_general,
            einsum,
        )
    if (precision or einsum_dot_general) and einsum:
        raise ValueError(
            "precision/einsum_dot_general and einsum are mutually exclusive: give only one of them."
        )
    if einsum_dot_general is not None:
        einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=einsum_dot_general)
    attention.check_shapes(query, key)
    narrow = (
        not force_fp32_for_softmax or current_policy() is not None
    )  # what it asks for is so in any case
    dropout = Dropout(broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    sow = functools.partial(module.sow, "intermediates", "attention_weights") if module else None
    options: dict[str, Any] = {"bias": bias, "mask": mask, "precision": precision, "einsum": einsum}
    return weights_of_call(
        query, key, dropout, sow, dtype=query.dtype if narrow else None, **options
    )


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
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: flax_nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    implementation: Literal["xla", "cudnn", "splash"] | None = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention`, with logits and softmax in reduction_dtype.

    Arguments and masks are Flax's. In float32 and wider it is Flax's own function.

    Args:
      query: (batch..., queries, heads, width).
      key, value: (batch..., keys, key heads, width), where the key heads divide the heads (Flax's
        own function takes equal ones only).
      implementation: "cudnn" and "splash" are the fused kernels of NVIDIA GPUs and TPUs, "xla" is
        neither; None chooses (`mpmodules.functions.fused_attention.choose.fused_kernel` says when).

    Returns:
      (batch..., queries, heads, width) in the inputs' dtype (or `dtype`); with
      `force_fp32_for_softmax` in float32 where no policy holds, as Flax's.

    Raises:
      ValueError: one of the two einsums without the other, or together with `precision` or
        `einsum_dot_general`; shapes that do not fit; an `implementation` that lacks a feature that
        is asked for.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8), jnp.bfloat16)
      >>> y = linen.dot_product_attention(x, x, x)
      >>> y.shape, y.dtype
      ((2, 5, 4, 8), dtype(bfloat16))
    """
    positional = (bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    dtype = attention.operand_dtype(dtype, query, key, value)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    dropout = Dropout(broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    has_einsum = einsum_dot_general is not None or qk_attn_weights_einsum is not None
    wide_weights = force_fp32_for_softmax and current_policy() is None
    kernel = kernel_of_call(
        implementation,
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        is_causal=False,
        dropout=dropout,
        is_sown=module is not None,
        precision=precision,
        others={
            "a custom einsum": has_einsum,
            "force_fp32_for_softmax without a policy": wide_weights,
        },
    )
    if not is_half(query.dtype) and query.shape[-2] == key.shape[-2]:
        return flax_nn.dot_product_attention(
            query,
            key,
            value,
            *positional,
            dtype,
            precision,
            module,
            force_fp32_for_softmax,
            einsum_dot_general,
            qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )
    if bool(qk_attn_weights_einsum) != bool(attn_weights_value_einsum):
        raise ValueError(
            "qk_attn_weights_einsum and attn_weights_value_einsum must be specified together."
        )
    if (precision or einsum_dot_general) and qk_attn_weights_einsum:
        raise ValueError(
            "precision/einsum_dot_general and qk_attn_weights_einsum/attn_weights_value_einsum are "
            "mutually exclusive: give only one of them."
        )
    needs_weights = dropout.is_on or module is not None or has_einsum or wide_weights
    options: dict[str, Any] = {"bias": bias, "mask": mask, "precision": precision}
    attended = without_weights(kernel, needs_weights, query, key, value, **options)
    if attended is not None:
        return attended
    weights = dot_product_attention_weights(
        query,
        key,
        *positional,
        None,
        precision,
        module,
        force_fp32_for_softmax,
        einsum_dot_general=einsum_dot_general,
        einsum=qk_attn_weights_einsum,
    )
    if einsum_dot_general is not None:
        attn_weights_value_einsum = functools.partial(
            jnp.einsum, precision=precision, _dot_general=einsum_dot_general
        )
    if attn_weights_value_einsum is not None:
        return attn_weights_value_einsum("...hqk,...khd->...qhd", weights, value)
    return attention.weighted_values(weights, value, precision=precision)

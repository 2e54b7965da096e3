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
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mpmodules.functions import attention
from mpmodules.functions.functional import is_half
from mpmodules.layers.attention_calls import AttentionCall, codes_and_scales, layer_in_own_code
from policy.core.quantization import Quantized
from policy.core.scope import current_policy


@layer_in_own_code
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
    dropout = (broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    dtype = attention.operand_dtype(dtype, query, key)
    query, key = promote_dtype(query, key, dtype=dtype)
    if _is_flaxs(query, key):
        how = (dtype, precision, module, force_fp32_for_softmax, einsum_dot_general, einsum)
        return flax_nn.dot_product_attention_weights(query, key, bias, mask, *dropout, *how)
    _require_one(precision, einsum_dot_general, einsum, "einsum")
    # Under a policy their softmax is in float32 in any case.
    forced = force_fp32_for_softmax and current_policy() is None
    call = AttentionCall(
        bias,
        mask,
        *dropout,
        precision,
        module,
        "intermediates",
        einsum=einsum or _einsum_of(einsum_dot_general, precision),
        wide_weights=forced,
    )
    attention.check_shapes(query, key)
    return call.weights(query, key)


@layer_in_own_code
def dot_product_attention(
    query: jax.Array,
    key: jax.Array | Quantized,
    value: jax.Array | Quantized,
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
    attention_axes: PartitionSpec | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention`, with logits and softmax in reduction_dtype.

    Arguments and masks are Flax's. In float32 and wider it is Flax's own function.

    Args:
      query: (batch..., queries, heads, width).
      key, value: (batch..., keys, key heads, width), where the key heads divide the heads (Flax's
        own function takes equal ones only), as arrays or as codes and scales of
        `policy.quantized.quantize_cache`.
      implementation: "cudnn" and "splash" are the fused kernels of NVIDIA GPUs and TPUs, "xla" is
        neither; None chooses (`mpmodules.functions.fused_attention.fused_kernel` says when).
      attention_axes: the `PartitionSpec` of queries over the automatic axes of the mesh; None for
        that of `policy.use_policy`.
      soft_cap: limits the logits before the bias to +-soft_cap by tanh, as Gemma 2 does; None does
        not.

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
    dropout = (broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    einsums = (qk_attn_weights_einsum, attn_weights_value_einsum)
    keys, values, scales = codes_and_scales(query, key, value)
    dtype = attention.operand_dtype(dtype, query, keys, values)
    query, keys, values = promote_dtype(query, keys, values, dtype=dtype)
    upstream = None
    if _is_flaxs(query, keys) and soft_cap is None and not scales:
        how = (dtype, precision, module, force_fp32_for_softmax, einsum_dot_general, *einsums)
        upstream = functools.partial(
            flax_nn.dot_product_attention, query, keys, values, bias, mask, *dropout, *how
        )
    if bool(qk_attn_weights_einsum) != bool(attn_weights_value_einsum):
        raise ValueError(
            "qk_attn_weights_einsum and attn_weights_value_einsum must be specified together."
        )
    names = "qk_attn_weights_einsum/attn_weights_value_einsum"
    _require_one(precision, einsum_dot_general, qk_attn_weights_einsum, names)
    of_dots = _einsum_of(einsum_dot_general, precision)
    forced = force_fp32_for_softmax and current_policy() is None
    call = AttentionCall(
        bias,
        mask,
        *dropout,
        precision,
        module,
        "intermediates",
        einsum=qk_attn_weights_einsum or of_dots,
        values_einsum=attn_weights_value_einsum or of_dots,
        wide_weights=forced,
        attention_axes=attention_axes,
        soft_cap=soft_cap,
        **scales,
    )
    return call.attend(implementation, query, keys, values, upstream)


def _is_flaxs(query: jax.Array, key: jax.Array) -> bool:
    """Returns whether Flax's own function computes attention: in float32 and wider, but for grouped
    queries, which it does not take.
    """
    return not is_half(query.dtype) and query.shape[-2] == key.shape[-2]


def _require_one(precision: Any, dot_general: Any, einsum: Any, name: str) -> None:
    if (precision or dot_general) and einsum:
        raise ValueError(
            f"precision/einsum_dot_general and {name} are mutually exclusive: give only one of "
            "them."
        )


def _einsum_of(dot_general: Any, precision: PrecisionLike) -> Callable[..., jax.Array] | None:
    if dot_general is None:
        return None
    return functools.partial(jnp.einsum, precision=precision, _dot_general=dot_general)

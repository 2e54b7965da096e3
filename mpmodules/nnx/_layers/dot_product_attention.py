"""`flax.nnx`'s attention functions, with logits and softmax in reduction_dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype as _flax_promote_dtype
from flax.typing import PrecisionLike
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mpmodules.functions import attention
from mpmodules.functions.functional import is_wider
from mpmodules.layers.attention_calls import (
    AttentionCall,
    codes_and_scales,
    layer_in_own_code,
    reduction_dtype,
)
from policy.core.quantization import Quantized
from policy.core.scope import current_policy


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
    module: flax_nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = _flax_promote_dtype,
    is_causal: bool = False,
    *,
    implementation: Literal["xla", "cudnn", "splash"] | None = None,
    attention_axes: PartitionSpec | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """`flax.nnx.dot_product_attention`, with logits and softmax in reduction_dtype on every path.

    Arguments and masks are Flax's; `precision` is obeyed with and without dropout. Float32 inputs
    take Flax's own function, and where no policy is in force float64 ones too; that computes in
    float32.

    Args:
      query: (batch..., queries, heads, width).
      key, value: (batch..., keys, key heads, width), as arrays or as codes and scales of
        `policy.quantized.quantize_cache`.
      implementation: "cudnn" and "splash" are the fused kernels of NVIDIA GPUs and TPUs, "xla" is
        neither; None chooses (`mpmodules.functions.fused_attention.fused_kernel` says when).
      attention_axes: the `PartitionSpec` of queries over the automatic axes of the mesh; None for
        that of `policy.use_policy`.
      soft_cap: limits the logits before the bias to +-soft_cap by tanh, as Gemma 2 does; None does
        not.

    Returns:
      (batch..., queries, heads, width) in the inputs' dtype (or `dtype`).

    Raises:
      ValueError: shapes that do not fit, a dropout rate without a key, or an `implementation` that
        lacks a feature that is asked for.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8), jnp.bfloat16)
      >>> y = nnx.dot_product_attention(x, x, x)
      >>> y.shape, y.dtype
      ((2, 5, 4, 8), dtype(bfloat16))
    """
    dropout = (broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    keys, values, scales = codes_and_scales(query, key, value)
    dtype = attention.operand_dtype(dtype, query, keys, values)
    query, keys, values = promote_dtype((query, keys, values), dtype=dtype)
    upstream = None
    # Flax's computes logits in float32 for float64 too.
    is_ours = current_policy() is not None and query.dtype == jnp.float64
    is_ours = is_ours or soft_cap is not None or bool(scales)
    if not (is_ours or is_wider(reduction_dtype(), query.dtype)):
        how = (dtype, precision, module, promote_dtype, is_causal)
        upstream = functools.partial(
            flax_nnx.dot_product_attention, query, keys, values, bias, mask, *dropout, *how
        )
    collection = flax_nnx.Intermediate
    call = AttentionCall(
        bias,
        mask,
        *dropout,
        precision,
        module,
        collection,
        is_causal,
        attention_axes=attention_axes,
        soft_cap=soft_cap,
        **scales,
    )
    return call.attend(implementation, query, keys, values, upstream)

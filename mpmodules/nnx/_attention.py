"""Attention: projections and weighted sums in compute_dtype, logits and softmax in reduction_dtype, on every path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.attention import dot_product_attention_weights as _flax_attention_weights
from flax.nnx.nn.dtypes import promote_dtype as _flax_promote_dtype

from mpmodules import attention
from mpmodules.functional import is_wider
from mpmodules.fused_attention import fused_kernel
from mpmodules.nnx._layer import constructor_dtypes
from mpmodules.nnx._module import Module
from mpmodules.nnx._port import adopt_children
from policy.policy import Policy
from policy.provenance import Source
from policy.scope import current_policy


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
    module: flax_nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = _flax_promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """`flax.nnx`'s attention weights, with logits and softmax in reduction_dtype whatever the inputs are.

    Arguments and masks are Flax's. Float32 inputs take Flax's own function.

    Args:
      query: (batch..., queries, heads, width); `key`: (batch..., keys, key heads, width).

    Returns:
      Weights (batch..., heads, queries, keys) in the inputs' dtype (or `dtype`).

    Raises:
      ValueError: shapes that do not fit, or a dropout rate without a key.
    """
    dtype = attention.operand_dtype(dtype, query, key)
    query, key = promote_dtype((query, key), dtype=dtype)
    reduction_dtype = _reduction_dtype()
    if not _is_ours(query):
        return _flax_attention_weights(
            query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision,
            module, promote_dtype, is_causal,
        )  # fmt: skip
    weights = attention.dot_product_attention_weights(
        query,
        key,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        precision=precision,
        reduction_dtype=reduction_dtype,
        dtype=query.dtype,
    )
    if module:
        module.sow(flax_nnx.Intermediate, "attention_weights", weights)
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
    module: flax_nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = _flax_promote_dtype,
    is_causal: bool = False,
    *,
    implementation: Literal["xla", "cudnn", "splash"] | None = None,
) -> jax.Array:
    """`flax.nnx.dot_product_attention`, with logits and softmax in reduction_dtype on every path.

    Arguments and masks are Flax's; `precision` is obeyed with and without dropout. Float32 inputs take
    Flax's own function, and where no policy is in force float64 ones too; that computes in float32.

    Args:
      query: (batch..., queries, heads, width); `key` and `value`: (batch..., keys, key heads, width).
      implementation: "cudnn" and "splash" are the fused kernels of NVIDIA GPUs and TPUs, "xla" is neither; None
        chooses (`mpmodules.fused_attention.fused_kernel` says when).

    Returns:
      (batch..., queries, heads, width) in the inputs' dtype (or `dtype`).

    Raises:
      ValueError: shapes that do not fit, a dropout rate without a key, or an `implementation` that can't do what is
        asked for.
    """
    dtype = attention.operand_dtype(dtype, query, key, value)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    obstacles = {
        "dropout": not deterministic and dropout_rate > 0.0,
        "sown weights": module is not None,
        "a precision": precision is not None,
    }
    fused = fused_kernel(
        implementation, query, key, value, bias=bias, mask=mask, is_causal=is_causal,
        reduction_dtype=_reduction_dtype(), obstacles=obstacles,
    )  # fmt: skip
    if not _is_ours(query):
        return flax_nnx.dot_product_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, promote_dtype, is_causal,
        )  # fmt: skip
    attention.check_shapes(query, key, value)
    if fused is not None:
        return fused(query, key, value)
    if not (obstacles["dropout"] or obstacles["sown weights"]):
        return attention.dot_product_attention(
            query, key, value, bias=bias, mask=mask, is_causal=is_causal, precision=precision,
            reduction_dtype=_reduction_dtype(),
        )  # fmt: skip
    weights = dot_product_attention_weights(
        query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, None, precision, module,
        is_causal=is_causal,
    )  # fmt: skip
    return attention.weighted_values(weights, value, precision=precision)


def _is_ours(query: jax.Array) -> bool:
    """Returns whether attention over such queries is ours: Flax's computes logits in float32 for float64 too."""
    in_float64 = current_policy() is not None and query.dtype == jnp.float64
    return in_float64 or is_wider(_reduction_dtype(), query.dtype)


def _reduction_dtype() -> Any:
    policy = current_policy()
    return jnp.dtype(jnp.float32) if policy is None else policy.reduction_dtype


def _decoding(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer's `__call__`, which may decode in x64 mode."""

    @functools.wraps(call)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        decodes = self.decode if kwargs.get("decode") is None else kwargs["decode"]
        with attention.adding_indices(bool(decodes)):
            return call(self, *args, **kwargs)

    return wrapped


class MultiHeadAttention(Module, flax_nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` that obeys policies.

    Projections and the weighted sum of values run in compute_dtype, logits and softmax in reduction_dtype, with
    dropout, sown weights, masks, grouped queries and decoding alike. An `attention_fn` of the user's own is obeyed.
    """

    def _construct(
        self,
        policy: Policy | None,
        source: Source,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        effective, kwargs = constructor_dtypes(self, upstream_init, policy, source, kwargs)
        if kwargs.get("attention_fn") in (None, flax_nnx.dot_product_attention):
            kwargs["attention_fn"] = dot_product_attention
        upstream_init(self, *args, **kwargs)
        self._capture(effective.policy, effective.source)
        adopt_children(self, effective.policy)

    __call__ = _decoding(flax_nnx.MultiHeadAttention.__call__)

    def init_cache(self, input_shape: Any, dtype: Any = None) -> None:
        """Runs Flax's `init_cache` in compute_dtype, or in float32 with no policy, unless `dtype` is given."""
        if dtype is None:
            dtype = jnp.float32 if self.dtype is None else self.dtype
        super().init_cache(input_shape, dtype)

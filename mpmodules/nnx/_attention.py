"""Attention: projections and weighted sums in compute_dtype, logits and softmax in reduction_dtype, on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.attention import dot_product_attention_weights as _flax_attention_weights
from flax.nnx.nn.dtypes import promote_dtype as _flax_promote_dtype

from mpmodules import functional
from mpmodules.nnx._layer import constructor_dtypes
from mpmodules.nnx._module import Module
from mpmodules.nnx._port import adopt_children
from policy.policy import Policy
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

    Arguments and masks are Flax's. Inputs as wide as reduction_dtype take Flax's own function.

    Args:
      query: (batch..., queries, heads, width); `key`: (batch..., keys, key heads, width).

    Returns:
      Weights (batch..., heads, queries, keys) in the inputs' dtype (or `dtype`).

    Raises:
      ValueError: shapes that do not fit, or a dropout rate without a key.
    """
    query, key = promote_dtype((query, key), dtype=dtype)
    reduction_dtype = _reduction_dtype()
    if not functional.is_wider(reduction_dtype, query.dtype):
        return _flax_attention_weights(
            query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision,
            module, promote_dtype, is_causal,
        )  # fmt: skip
    weights = functional.dot_product_attention_weights(
        query,
        key,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        precision=precision,
        reduction_dtype=reduction_dtype,
    ).astype(query.dtype)
    if module:
        module.sow(flax_nnx.Intermediate, "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        weights = functional.attention_dropout(
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
) -> jax.Array:
    """`flax.nnx.dot_product_attention`, with logits and softmax in reduction_dtype on every path.

    Arguments and masks are Flax's; `precision` is obeyed with and without dropout. Inputs as wide as
    reduction_dtype take Flax's own function.

    Args:
      query: (batch..., queries, heads, width); `key` and `value`: (batch..., keys, key heads, width).

    Returns:
      (batch..., queries, heads, width) in the inputs' dtype (or `dtype`).

    Raises:
      ValueError: shapes that do not fit, or a dropout rate without a key.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if not functional.is_wider(_reduction_dtype(), query.dtype):
        return flax_nnx.dot_product_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, promote_dtype, is_causal,
        )  # fmt: skip
    functional.check_attention_shapes(query, key, value)
    weights = dot_product_attention_weights(
        query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, None, precision, module,
        is_causal=is_causal,
    )  # fmt: skip
    return functional.weighted_values(weights, value, precision=precision)


def _reduction_dtype() -> Any:
    policy = current_policy()
    return jnp.dtype(jnp.float32) if policy is None else policy.reduction_dtype


class MultiHeadAttention(Module, flax_nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` that obeys policies.

    Projections and the weighted sum of values run in compute_dtype, logits and softmax in reduction_dtype, with
    dropout, sown weights, masks, grouped queries and decoding alike. An `attention_fn` of the user's own is obeyed.
    """

    def _construct(
        self,
        policy: Policy | None,
        source: str | None,
        upstream_init: Callable[..., None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        policy, kwargs = constructor_dtypes(self, upstream_init, policy, source is not None, kwargs)
        if kwargs.get("attention_fn") in (None, flax_nnx.dot_product_attention):
            kwargs["attention_fn"] = dot_product_attention
        upstream_init(self, *args, **kwargs)
        self._capture(policy, source)
        adopt_children(self, policy)

    def init_cache(self, input_shape: Any, dtype: Any = None) -> None:
        """Flax's `init_cache`, in compute_dtype, or in float32 with no policy, unless `dtype` says otherwise."""
        if dtype is None:
            dtype = jnp.float32 if self.dtype is None else self.dtype
        super().init_cache(input_shape, dtype)

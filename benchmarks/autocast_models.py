"""Models written once: with dtype=None for autocast, or the half dtype threaded through by hand, as
Flax's users do.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax


class Reused(nn.Module):
    """One Dense layer, used several times."""

    dtype: Any = None
    times: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.Dense(x.shape[-1], dtype=self.dtype)
        for _ in range(self.times):
            x = nn.relu(layer(x))
        return x


def einsum_in_half(subscripts: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Of attention's weights and values: after `force_fp32_for_softmax` Flax multiplies them in
    float32.
    """
    return jnp.einsum(subscripts, weights.astype(values.dtype), values)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm."""

    dtype: Any = None
    heads: int = 4
    dropout: float = 0.0
    gelu: bool = False
    einsum_in_half: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        width, drop = x.shape[-1], nn.Dropout(self.dropout, deterministic=not self.dropout)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            use_bias=False,
            force_fp32_for_softmax=self.dtype is not None,
            qk_attn_weights_einsum_cls=(lambda: jnp.einsum) if self.einsum_in_half else None,
            attn_weights_value_einsum_cls=(lambda: einsum_in_half) if self.einsum_in_half else None,
            dropout_rate=self.dropout,
            deterministic=not self.dropout,
            broadcast_dropout=False,
        )(y, mask=mask)
        x = x + drop(y)
        y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        y = drop(nn.gelu(y) if self.gelu else nn.relu(y))
        return x + drop(nn.Dense(width, dtype=self.dtype)(y))


class Decoder(nn.Module):
    """A causal language model; with dropout and relu, Flax's lm1b example."""

    dtype: Any = None
    layers: int = 12
    width: int = 64
    vocabulary: int = 256
    dropout: float = 0.0
    gelu: bool = False
    tied: bool = False
    einsum_in_half: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        half = self.dtype or jnp.float32
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (1, tokens.shape[1], self.width)
        )
        mask = nn.combine_masks(
            nn.make_attention_mask(tokens > 0, tokens > 0, dtype=half), nn.make_causal_mask(tokens)
        )
        x = embed(tokens) + positions.astype(half)
        for i in range(self.layers):
            block = Block(
                self.dtype, 4, self.dropout, self.gelu, self.einsum_in_half, name=f"block_{i}"
            )
            x = block(x, mask)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return (
            embed.attend(x)
            if self.tied
            else nn.Dense(self.vocabulary, dtype=self.dtype, name="logits")(x)
        )


class Recurrent(nn.Module):
    """tanh(x W + h U + b), its state in float32 either way."""

    dtype: Any = None
    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape, half = (self.width, self.width), self.dtype or jnp.float32
        w, u = (self.param(name, nn.initializers.orthogonal(), shape) for name in "wu")
        b = self.param("b", nn.initializers.zeros, (self.width,))

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(
                x.astype(half) @ w.astype(half) + h.astype(half) @ u.astype(half) + b.astype(half)
            )
            return h.astype(jnp.float32), h

        first = jnp.zeros((x.shape[1], self.width))
        return lax.scan(step, first, x)[1]


def squares(outputs: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(outputs.astype(jnp.float32)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()

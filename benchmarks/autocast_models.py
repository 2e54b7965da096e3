"""Models written once: with dtype=None for autocast, or the half dtype threaded through by hand, as Flax's users do."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax


class Mlp(nn.Module):
    """Dense layers with biases and relu."""

    dtype: Any = None
    layers: int = 4
    width: int = 1024

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers - 1):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.width, dtype=self.dtype)(x)


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


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    filters: int
    strides: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros_init())(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(conv(4 * self.filters, (1, 1), self.strides, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Flax's ImageNet example: version 1.5, its strides in the 3x3 convolutions."""

    dtype: Any = None
    filters: int = 64
    stages: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.filters, (7, 7), 2, padding=3, use_bias=False, dtype=self.dtype, name="conv_init")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype, name="bn_init")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                x = Bottleneck(self.filters * 2**i, 2 if i and not j else 1, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


def einsum_in_half(subscripts: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Of attention's weights and values: after `force_fp32_for_softmax` Flax multiplies them in float32."""
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
        positions = self.param("positions", nn.initializers.normal(0.02), (1, tokens.shape[1], self.width))
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0, dtype=half), nn.make_causal_mask(tokens))
        x = embed(tokens) + positions.astype(half)
        for i in range(self.layers):
            block = Block(self.dtype, 4, self.dropout, self.gelu, self.einsum_in_half, name=f"block_{i}")
            x = block(x, mask)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocabulary, dtype=self.dtype, name="logits")(x)


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
            h = jnp.tanh(x.astype(half) @ w.astype(half) + h.astype(half) @ u.astype(half) + b.astype(half))
            return h.astype(jnp.float32), h

        first = jnp.zeros((x.shape[1], self.width))
        return lax.scan(step, first, x)[1]


def squares(outputs: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(outputs.astype(jnp.float32)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

"""The shape of Flax's gemma example, small: RMSNorm with 1 + scale, rotary positions, grouped
queries, soft caps, sliding windows, a gated feed-forward layer, tied embeddings and a cache that is
handed through.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

K_MASK = -2.3819763e38


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    num_embed: int = 32
    embed_dim: int = 16
    hidden_dim: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    num_layers: int = 2
    window: int = 3
    attention_cap: float = 10.0
    logits_cap: float = 8.0
    dtype: Any = jnp.float32
    weight_dtype: Any = jnp.float32


def apply_rope(inputs, positions, max_wavelength=10_000):
    """Turns the pairs of a head (n, T, heads, H) by their positions (n, T)."""
    half = inputs.shape[-1] // 2
    timescale = max_wavelength ** (jnp.arange(half) / half)
    angles = positions[..., None, None] / timescale  # (n, T, 1, H / 2)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(inputs, 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(inputs.dtype)


class RMSNorm(nnx.Module):
    def __init__(
        self,
        dim: int,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        weight_dtype: Any = jnp.float32,
    ):
        self.dtype = dtype
        self.scale = nnx.Param(nnx.initializers.zeros_init()(rngs.params(), (dim,), weight_dtype))

    def __call__(self, x):
        x = jnp.asarray(x, jnp.float32)
        mean2 = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed = jnp.asarray(x * jax.lax.rsqrt(mean2 + 1e-6), dtype=self.dtype)
        scale = jnp.asarray(self.scale[...], self.dtype)
        return normed * (1.0 + scale)


class ScaledEmbed(nnx.Embed):
    def __call__(self, inputs, out_sharding=None):
        x = super().__call__(inputs, out_sharding)
        x *= jnp.sqrt(x.shape[-1])
        return x


class Attention(nnx.Module):
    def __init__(
        self,
        config: TransformerConfig,
        window: int | None,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        weight_dtype: Any = jnp.float32,
    ):
        self.config, self.window = config, window
        heads, kv_heads = config.num_heads, config.num_kv_heads
        width, head_dim = config.embed_dim, config.head_dim
        learned = functools.partial(
            nnx.Einsum,
            dtype=dtype,
            param_dtype=weight_dtype,
            rngs=rngs,
        )
        self.q_einsum = learned("BTD,NDH->BTNH", (heads, width, head_dim))
        self.kv_einsum = learned("BTD,CKDH->CBTKH", (2, kv_heads, width, head_dim))
        self.attn_vec_einsum = learned("BTNH,NHD->BTD", (heads, head_dim, width))
        norm = functools.partial(
            RMSNorm,
            head_dim,
            dtype=dtype,
            weight_dtype=weight_dtype,
            rngs=rngs,
        )
        self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x, positions, cache, mask):
        config = self.config
        batch, length = x.shape[:2]
        groups = config.num_heads // config.num_kv_heads
        query = apply_rope(self.query_norm(self.q_einsum(x)), positions) * config.head_dim**-0.5
        key, value = self.kv_einsum(x)
        key = apply_rope(self.key_norm(key), positions)
        if cache is not None:
            start = (0, cache["end_index"][0], 0, 0)
            value = jax.lax.dynamic_update_slice(cache["v"], value, start)
            key = jax.lax.dynamic_update_slice(cache["k"], key, start)
            cache = {"v": value, "k": key, "end_index": cache["end_index"] + length}
        query = query.reshape((batch, length, config.num_kv_heads, groups, config.head_dim))
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", query, key)
        logits = jnp.tanh(logits / config.attention_cap) * config.attention_cap
        if self.window is not None:
            ones = jnp.ones(mask.shape, bool)
            mask = mask & jnp.triu(ones, 1 - self.window) & jnp.tril(ones, self.window - 1)
        logits = jnp.where(mask[:, :, None, None], logits, K_MASK)
        probs = jax.nn.softmax(logits, axis=-1).astype(key.dtype)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probs, value)
        encoded = encoded.reshape((batch, length, config.num_heads, config.head_dim))
        return cache, self.attn_vec_einsum(encoded)

    def init_cache(self, cache_size, batch_size, dtype=jnp.float32):
        shape = (batch_size, cache_size, self.config.num_kv_heads, self.config.head_dim)
        return {
            "v": jnp.zeros(shape, dtype=dtype),
            "k": jnp.zeros(shape, dtype=dtype),
            "end_index": jnp.zeros((batch_size,), int),
        }


class FeedForward(nnx.Module):
    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        weight_dtype: Any = jnp.float32,
    ):
        linear = functools.partial(
            nnx.Linear,
            use_bias=False,
            dtype=dtype,
            param_dtype=weight_dtype,
            rngs=rngs,
        )
        self.gate_proj, self.up_proj = linear(features, hidden), linear(features, hidden)
        self.down_proj = linear(hidden, features)

    def __call__(self, x):
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, config: TransformerConfig, window: int | None, *, rngs: nnx.Rngs):
        dtype = config.dtype
        weight_dtype = config.weight_dtype
        norm = functools.partial(
            RMSNorm,
            config.embed_dim,
            dtype=dtype,
            weight_dtype=weight_dtype,
            rngs=rngs,
        )
        self.pre_attention_norm = norm()
        self.attn = Attention(
            config,
            window,
            dtype=dtype,
            weight_dtype=weight_dtype,
            rngs=rngs,
        )
        self.post_attention_norm, self.pre_ffw_norm = norm(), norm()
        self.mlp = FeedForward(
            config.embed_dim,
            config.hidden_dim,
            dtype=dtype,
            weight_dtype=weight_dtype,
            rngs=rngs,
        )

    def __call__(self, x, positions, cache, mask):
        cache, y = self.attn(self.pre_attention_norm(x), positions, cache, mask)
        x = x + self.post_attention_norm(y)
        return cache, x + self.mlp(self.pre_ffw_norm(x))


class Transformer(nnx.Module):
    """Tokens and positions (n, T), mask (n, T, S) -> logits (n, T, num_embed) and the new cache."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedder = ScaledEmbed(
            config.num_embed,
            config.embed_dim,
            dtype=config.dtype,
            param_dtype=config.weight_dtype,
            rngs=rngs,
        )
        windows = [None if layer % 2 else config.window for layer in range(config.num_layers)]
        self.layers = nnx.List([Block(config, window, rngs=rngs) for window in windows])
        self.final_norm = RMSNorm(
            config.embed_dim,
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            rngs=rngs,
        )

    def __call__(self, tokens, positions, cache, mask):
        x = self.embedder(tokens)
        new_cache = None if cache is None else {}
        for i, layer in enumerate(self.layers):
            layer_cache, x = layer(x, positions, cache and cache[f"layer_{i}"], mask)
            if new_cache is not None:
                new_cache[f"layer_{i}"] = layer_cache
        logits = self.embedder.attend(self.final_norm(x))
        return jnp.tanh(logits / self.config.logits_cap) * self.config.logits_cap, new_cache

    def init_cache(self, cache_size, batch_size, dtype=jnp.float32):
        return {
            f"layer_{i}": layer.attn.init_cache(cache_size, batch_size, dtype)
            for i, layer in enumerate(self.layers)
        }

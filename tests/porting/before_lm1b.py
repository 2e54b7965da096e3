"""The shape of Flax's lm1b example, small: a decoder of one token after the other, with a cache for
sampling.

What a port changes is marked: `goes` on a line that it deletes, and `# +` before one that it
writes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax import lax


@struct.dataclass
class TransformerConfig:
    vocab_size: int = 32
    dtype: Any = jnp.float32  # goes
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 2
    mlp_dim: int = 32
    max_len: int = 16
    dropout_rate: float = 0.1
    deterministic: bool = True
    decode: bool = False


def shift_right(tokens):
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


def sinusoids(max_len, width):
    """(1, max_len, width): sines, then cosines, of the positions over wavelengths up to 10000."""
    rates = np.exp(np.arange(width // 2) * -np.log(10000.0) / (width // 2 - 1))
    angles = np.arange(max_len)[:, None] * rates
    return jnp.array(np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[None])


class AddPositionEmbs(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        table = sinusoids(self.config.max_len, inputs.shape[-1])
        pe = table[:, : inputs.shape[1]]
        if self.config.decode:
            started = self.has_variable("cache", "cache_index")
            index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.uint32))
            if started:
                i = index.value
                index.value = i + 1
                pe = lax.dynamic_slice_in_dim(table, i, 1, axis=1)
        return inputs + pe  # goes
        # + return inputs + pe.astype(inputs.dtype)  # stays


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        x = nn.Dense(
            config.mlp_dim,
            dtype=config.dtype,  # goes
        )(inputs)
        x = nn.relu(x)
        x = nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)
        x = nn.Dense(
            inputs.shape[-1],
            dtype=config.dtype,  # goes
        )(x)
        return nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)


class DecoderBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask=None):
        config = self.config
        x = nn.LayerNorm(
            dtype=config.dtype,  # goes
        )(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            dtype=config.dtype,  # goes
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.dropout_rate,
            deterministic=config.deterministic,
            decode=config.decode,
        )(x, mask=decoder_mask)
        x = inputs + nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)
        z = nn.LayerNorm(
            dtype=config.dtype,  # goes
        )(x)
        return x + MlpBlock(config)(z)


class TransformerLM(nn.Module):
    """(n, length) tokens -> (n, length, vocab_size) logits of each from those before it."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        decoder_mask = None
        if not config.decode:
            decoder_mask = nn.combine_masks(
                nn.make_attention_mask(inputs > 0, inputs > 0, dtype=config.dtype),  # goes
                nn.make_causal_mask(inputs, dtype=config.dtype),  # goes
                # + nn.make_attention_mask(inputs > 0, inputs > 0),
                # + nn.make_causal_mask(inputs),
            )
        y = inputs.astype("int32")
        y = y if config.decode else shift_right(y)
        y = nn.Embed(
            config.vocab_size,
            config.emb_dim,
            embedding_init=nn.initializers.normal(1.0),
            name="embed",
        )(y)
        y = AddPositionEmbs(config, name="posembed")(y)
        y = nn.Dropout(config.dropout_rate)(y, deterministic=config.deterministic)
        y = y.astype(config.dtype)  # goes
        for layer in range(config.num_layers):
            y = DecoderBlock(config, name=f"block_{layer}")(y, decoder_mask)
        y = nn.LayerNorm(
            dtype=config.dtype,  # goes
            name="norm",
        )(y)
        logits = nn.Dense(
            config.vocab_size,
            dtype=config.dtype,  # goes
            name="logitdense",
        )(y)
        return logits.astype(config.dtype)  # goes
        # + return logits


def initialize_cache(key, config, shape):
    tokens = jnp.ones(shape, config.dtype)  # goes
    # + tokens = jnp.ones(shape)
    return TransformerLM(config).init(key, tokens)["cache"]

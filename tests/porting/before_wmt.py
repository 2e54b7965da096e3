"""The shape of Flax's wmt example, small: an encoder and a decoder that share their embedding, and
its cached decoding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.porting.before_transformer import (
    AddPositionEmbs,
    MlpBlock,
    TransformerConfig,
    shift_right,
)


def preferred_dtype(use_mixed_precision):
    platform = jax.local_devices()[0].platform
    if use_mixed_precision:
        if platform == "tpu":
            return jnp.bfloat16
        elif platform == "gpu":
            return jnp.float16
    return jnp.float32


class Attention(nn.Module):
    """Attention after a LayerNorm, added to what came in; to `memory`, where it is given."""

    config: TransformerConfig
    decode: bool = False

    @nn.compact
    def __call__(self, inputs, memory=None, mask=None):
        config = self.config
        x = nn.LayerNorm(dtype=config.dtype)(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            dtype=config.dtype,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.dropout_rate,
            deterministic=config.deterministic,
            decode=self.decode,
        )(x, memory, mask=mask)
        return inputs + nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)


class Encoder(nn.Module):
    config: TransformerConfig
    embed: Any

    @nn.compact
    def __call__(self, inputs, mask):
        config = self.config
        x = AddPositionEmbs(config, name="posembed")(self.embed(inputs.astype("int32")))
        x = nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)
        x = x.astype(config.dtype)
        for layer in range(config.num_layers):
            x = Attention(config, name=f"attention_{layer}")(x, mask=mask)
            y = nn.LayerNorm(dtype=config.dtype)(x)
            x = x + MlpBlock(config, name=f"mlp_{layer}")(y)
        return nn.LayerNorm(dtype=config.dtype, name="norm")(x)


class Decoder(nn.Module):
    config: TransformerConfig
    embed: Any

    @nn.compact
    def __call__(self, encoded, targets, decoder_mask, encoder_decoder_mask):
        config = self.config
        y = targets.astype("int32")
        y = self.embed(y if config.decode else shift_right(y))
        y = AddPositionEmbs(config, config.decode, name="posembed")(y)
        y = nn.Dropout(config.dropout_rate)(y, deterministic=config.deterministic)
        y = y.astype(config.dtype)
        for layer in range(config.num_layers):
            y = Attention(config, config.decode, name=f"attention_{layer}")(y, mask=decoder_mask)
            y = Attention(config, name=f"cross_{layer}")(y, encoded, encoder_decoder_mask)
            z = nn.LayerNorm(dtype=config.dtype)(y)
            y = y + MlpBlock(config, name=f"mlp_{layer}")(z)
        y = nn.LayerNorm(dtype=config.dtype, name="norm")(y)
        logits = self.embed.attend(y.astype(jnp.float32))
        return logits / jnp.sqrt(y.shape[-1])


class Transformer(nn.Module):
    """(n, S) and (n, T) tokens -> (n, T, vocab_size) logits of each target from those before it."""

    config: TransformerConfig

    def setup(self):
        config = self.config
        self.embed = nn.Embed(
            config.vocab_size, config.emb_dim, embedding_init=nn.initializers.normal(1.0)
        )
        self.encoder = Encoder(config, self.embed)
        self.decoder = Decoder(config, self.embed)

    def encode(self, inputs):
        mask = nn.make_attention_mask(inputs > 0, inputs > 0, dtype=self.config.dtype)
        return self.encoder(inputs, mask)

    def decode(self, encoded, inputs, targets):
        config = self.config
        decoder_mask, there = None, jnp.ones_like(targets) > 0
        if not config.decode:
            there = targets > 0
            decoder_mask = nn.combine_masks(
                nn.make_attention_mask(there, there, dtype=config.dtype),
                nn.make_causal_mask(targets, dtype=config.dtype),
            )
        encoder_decoder_mask = nn.make_attention_mask(there, inputs > 0, dtype=config.dtype)
        logits = self.decoder(encoded, targets, decoder_mask, encoder_decoder_mask)
        return logits.astype(config.dtype)

    def __call__(self, inputs, targets):
        return self.decode(self.encode(inputs), inputs, targets)


def initialize_cache(key, config, inputs_shape, targets_shape):
    inputs = jnp.ones(inputs_shape, config.dtype)
    targets = jnp.ones(targets_shape, config.dtype)
    return Transformer(config).init(key, inputs, targets)["cache"]

"""The shape of Flax's lm1b example, small: a decoder of one token after the other, with a cache for
sampling.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from tests.porting.before_transformer import (
    AddPositionEmbs,
    MlpBlock,
    TransformerConfig,
    shift_right,
)


class DecoderBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask=None):
        config = self.config
        x = nn.LayerNorm(
            dtype=config.dtype,
        )(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            dtype=config.dtype,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.dropout_rate,
            deterministic=config.deterministic,
            decode=config.decode,
        )(x, mask=decoder_mask)
        x = inputs + nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)
        z = nn.LayerNorm(
            dtype=config.dtype,
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
                nn.make_attention_mask(inputs > 0, inputs > 0, dtype=config.dtype),
                nn.make_causal_mask(inputs, dtype=config.dtype),
            )
        y = inputs.astype("int32")
        y = y if config.decode else shift_right(y)
        y = nn.Embed(
            config.vocab_size,
            config.emb_dim,
            embedding_init=nn.initializers.normal(1.0),
            name="embed",
        )(y)
        y = AddPositionEmbs(config, config.decode, name="posembed")(y)
        y = nn.Dropout(config.dropout_rate)(y, deterministic=config.deterministic)
        y = y.astype(config.dtype)
        for layer in range(config.num_layers):
            y = DecoderBlock(config, name=f"block_{layer}")(y, decoder_mask)
        y = nn.LayerNorm(
            dtype=config.dtype,
            name="norm",
        )(y)
        logits = nn.Dense(
            config.vocab_size,
            dtype=config.dtype,
            name="logitdense",
        )(y)
        return logits.astype(config.dtype)


def initialize_cache(key, config, shape):
    tokens = jnp.ones(shape, config.dtype)
    return TransformerLM(config).init(key, tokens)["cache"]

"""The shape of Flax's wmt example, small: an encoder and a decoder that share their embedding, and
its cached decoding.

What a port changes is marked: `goes` on a line that it deletes, and `# +` before one that it
writes.
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


def preferred_dtype(use_mixed_precision):  # goes
    platform = jax.local_devices()[0].platform  # goes
    if use_mixed_precision:  # goes
        if platform == "tpu":  # goes
            return jnp.bfloat16  # goes
        elif platform == "gpu":  # goes
            return jnp.float16  # goes
    return jnp.float32  # goes


class Attention(nn.Module):
    """Attention after a LayerNorm, added to what came in; to `memory`, where it is given."""

    config: TransformerConfig
    decode: bool = False

    @nn.compact
    def __call__(self, inputs, memory=None, mask=None):
        config = self.config
        x = nn.LayerNorm(dtype=config.dtype)(inputs)  # goes
        # + x = nn.LayerNorm()(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            dtype=config.dtype,  # goes
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
        x = x.astype(config.dtype)  # goes
        for layer in range(config.num_layers):
            x = Attention(config, name=f"attention_{layer}")(x, mask=mask)
            y = nn.LayerNorm(dtype=config.dtype)(x)  # goes
            # + y = nn.LayerNorm()(x)
            x = x + MlpBlock(config, name=f"mlp_{layer}")(y)
        return nn.LayerNorm(dtype=config.dtype, name="norm")(x)  # goes
        # + return nn.LayerNorm(name="norm")(x)


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
        y = y.astype(config.dtype)  # goes
        for layer in range(config.num_layers):
            y = Attention(config, config.decode, name=f"attention_{layer}")(y, mask=decoder_mask)
            y = Attention(config, name=f"cross_{layer}")(y, encoded, encoder_decoder_mask)
            z = nn.LayerNorm(dtype=config.dtype)(y)  # goes
            # + z = nn.LayerNorm()(y)
            y = y + MlpBlock(config, name=f"mlp_{layer}")(z)
        y = nn.LayerNorm(dtype=config.dtype, name="norm")(y)  # goes
        # + y = nn.LayerNorm(name="norm")(y)
        logits = self.embed.attend(y.astype(jnp.float32))  # goes
        # + logits = self.embed.attend(y)
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
        mask = nn.make_attention_mask(inputs > 0, inputs > 0, dtype=self.config.dtype)  # goes
        # + mask = nn.make_attention_mask(inputs > 0, inputs > 0)
        return self.encoder(inputs, mask)

    def decode(self, encoded, inputs, targets):
        config = self.config
        decoder_mask, there = None, jnp.ones_like(targets) > 0
        if not config.decode:
            there = targets > 0
            decoder_mask = nn.combine_masks(
                nn.make_attention_mask(there, there, dtype=config.dtype),  # goes
                nn.make_causal_mask(targets, dtype=config.dtype),  # goes
                # + nn.make_attention_mask(there, there),
                # + nn.make_causal_mask(targets),
            )
        encoder_decoder_mask = nn.make_attention_mask(there, inputs > 0, dtype=config.dtype)  # goes
        # + encoder_decoder_mask = nn.make_attention_mask(there, inputs > 0)
        logits = self.decoder(encoded, targets, decoder_mask, encoder_decoder_mask)
        return logits.astype(config.dtype)  # goes
        # + return logits

    def __call__(self, inputs, targets):
        return self.decode(self.encode(inputs), inputs, targets)


def initialize_cache(key, config, inputs_shape, targets_shape):
    inputs = jnp.ones(inputs_shape, config.dtype)  # goes
    targets = jnp.ones(targets_shape, config.dtype)  # goes
    # + inputs = jnp.ones(inputs_shape)
    # + targets = jnp.ones(targets_shape)
    return Transformer(config).init(key, inputs, targets)["cache"]

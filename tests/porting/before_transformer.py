"""The parts that Flax's lm1b and wmt examples share, small.

`sources.before` writes it in the place of its import in the texts of both.
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
    dtype: Any = jnp.float32
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 1
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
    decode: bool = False

    @nn.compact
    def __call__(self, inputs):
        table = sinusoids(self.config.max_len, inputs.shape[-1])
        pe = table[:, : inputs.shape[1]]
        if self.decode:
            started = self.has_variable("cache", "cache_index")
            index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.uint32))
            if started:
                i = index.value
                index.value = i + 1
                pe = lax.dynamic_slice_in_dim(table, i, 1, axis=1)
        return inputs + pe


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        x = nn.Dense(
            config.mlp_dim,
            dtype=config.dtype,
        )(inputs)
        x = nn.relu(x)
        x = nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)
        x = nn.Dense(
            inputs.shape[-1],
            dtype=config.dtype,
        )(x)
        return nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic)

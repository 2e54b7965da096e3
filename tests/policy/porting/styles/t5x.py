"""As t5x and flaxformer: layers of their own, casts to a config's dtype, a float32 softmax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.linen import partitioning as nn_partitioning


@struct.dataclass
class T5Config:
    dtype: Any = jnp.float32
    float32_attention_logits: bool = True


class DenseGeneral(nn.Module):
    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs):
        kernel = self.param("kernel", nn.initializers.ones, (inputs.shape[-1], self.features))
        inputs, kernel = jnp.asarray(inputs, self.dtype), jnp.asarray(kernel, self.dtype)
        return jax.lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))


class T5LayerNorm(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = jnp.asarray(x, jnp.float32)
        scale = self.param("scale", nn.initializers.ones, (1, x.shape[-1]))
        y = jnp.asarray(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), self.dtype)
        return y * jnp.asarray(scale, self.dtype)


class Model(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, tokens):
        cfg = self.config
        embed = nn.Embed(
            num_embeddings=8,
            features=8,
            dtype=cfg.dtype,
            name="token_embedder",
        )
        x = embed(tokens)
        dense = functools.partial(DenseGeneral, dtype=cfg.dtype)
        y = T5LayerNorm(dtype=cfg.dtype)(x)
        logits = jnp.einsum("td,sd->ts", dense(8, name="q")(y), dense(8, name="k")(y))
        if cfg.float32_attention_logits:
            logits = logits.astype(jnp.float32)
        x = x + jax.nn.softmax(logits).astype(cfg.dtype) @ x
        return embed.attend(x) if cfg.dtype == jnp.float32 else x


def model() -> Any:
    assert nn_partitioning.__name__
    return Model(dataclasses.replace(T5Config(), dtype=jnp.float32))


INPUTS = (np.arange(6),)

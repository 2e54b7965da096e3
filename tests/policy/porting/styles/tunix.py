"""As tunix and bonsai: nnx, a dtype of the configuration, partials, a class from a layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32


class ScaledEmbed(nnx.Embed):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Model(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.dtype = config.dtype
        linear = functools.partial(
            nnx.Linear,
            use_bias=False,
            rngs=rngs,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
        )
        self.embed = ScaledEmbed(8, 8, dtype=config.dtype, rngs=rngs)
        self.up, self.down = linear(8, 16), linear(16, 8)
        self.norm = nnx.RMSNorm(
            num_features=8, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        self.router = nnx.Linear(8, 2, dtype=jnp.float32, rngs=rngs)

    def __call__(self, tokens):
        x = jnp.astype(self.embed(tokens), self.dtype)
        x = x + self.down(nnx.silu(self.up(self.norm(x))))
        return x * jax.nn.softmax(self.router(x.astype(jnp.float32))).max(-1, keepdims=True)


def model() -> Any:
    return Model(Config(), rngs=nnx.Rngs(0))


INPUTS = (np.arange(6),)

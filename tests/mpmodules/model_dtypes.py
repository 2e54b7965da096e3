"""Models of one dtype, their own setting, which some of their layers are given and others not."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx


class Linen(linen.Module):
    dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.LayerNorm()(linen.Dense(8, dtype=self.dtype)(x))
        return linen.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, dtype: Any = jnp.float32):
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(8, 8, dtype=dtype, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.up(x)))

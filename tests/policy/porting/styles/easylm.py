"""As EasyLM and Flax models of transformers: dtype, param_dtype and precision on each layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class MLP(nn.Module):
    dtype: jnp.dtype=jnp.float32
    param_dtype: jnp.dtype=jnp.float32
    precision: Any=None

    def setup(self):
        self.w1 = nn.Dense(
            16,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            use_bias=False,
            kernel_init=jax.nn.initializers.normal(0.5),
            precision=self.precision
        )
        self.w2 = nn.Dense(8, dtype=self.dtype,
                           param_dtype=self.param_dtype, precision=self.precision)

    def __call__(self, x):
        return self.w2(nn.silu(self.w1(x)))


class Model(nn.Module):
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.wte = nn.Embed(8, 8, dtype=self.dtype, param_dtype=self.param_dtype)
        self.blocks = [MLP(name=str(i), dtype=self.dtype, param_dtype=self.param_dtype)
                       for i in range(2)]
        self.router = nn.Dense(2, dtype=jnp.float32, param_dtype=self.param_dtype)
        self.lm_head = nn.Dense(
            8,
            dtype=self.dtype,  # of the logits
            param_dtype=self.param_dtype)

    def __call__(self, tokens):
        x = self.wte(tokens.astype("i4"))
        for block in self.blocks:
            x = x + block(x)
        gates = jax.nn.softmax(self.router(x))
        x = x * gates[..., :1].astype(self.dtype)
        mask = jnp.finfo(self.dtype).min
        return jnp.where(tokens[..., None] > 0, self.lm_head(x), mask)


def model() -> Any:
    return Model().clone(dtype=jnp.float32)


INPUTS = (np.arange(6),)

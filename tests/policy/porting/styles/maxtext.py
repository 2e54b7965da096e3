"""As MaxText and recurrentgemma: scan and remat, classes as values, dtypes by `**` and by name."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Config(NamedTuple):
    dtype: Any = jnp.float32
    weight_dtype: Any = jnp.float32
    width: int = 8


class Mlp(nn.Module):
    config: Config
    norm: Any = nn.LayerNorm

    @nn.compact
    def __call__(self, x, _):
        dtype, weight_dtype, width = self.config
        y = self.norm(dtype=dtype, name="norm")(x)
        y = nn.remat(nn.Dense)(width, dtype=self.config.dtype, param_dtype=self.config.weight_dtype)(y)
        return x + jnp.asarray(y, dtype), None


class Gate(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        options = {"dtype": self.config.dtype, "use_bias": False}
        return x * nn.sigmoid(nn.Dense(self.config.width, **options)(x)) + nn.Dense(
            self.config.width, dtype=self.config.dtype)(x)


class Model(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Mlp, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = layers(self.config, name="layers")(x, None)
        x = Gate(self.config)(x)
        wide = nn.LayerNorm(dtype=getattr(jnp, "float32"), name="out")(x)
        return nn.Dense(3, dtype=jnp.promote_types(self.config.dtype, jnp.float32))(wide)


def model() -> Any:
    return Model(Config(*Config()))


INPUTS = (np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8),)

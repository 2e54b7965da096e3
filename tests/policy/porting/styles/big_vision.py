"""As big_vision: the dtype as a text, through four modules, to matmul layers alone."""

from typing import Any, Optional

import flax.linen as nn
import jax.numpy as jnp
import numpy as np


class MlpBlock(nn.Module):
  mlp_dim: Optional[int] = None
  dtype_mm: str = "float32"

  @nn.compact
  def __call__(self, x):
    inits = dict(kernel_init=nn.initializers.xavier_uniform())
    d = x.shape[-1]
    x = nn.Dense(self.mlp_dim or 4 * d, dtype=self.dtype_mm, **inits)(x)
    x = nn.gelu(x)
    return nn.Dense(d, dtype=self.dtype_mm, **inits)(x)


class Model(nn.Module):
  dtype_mm: str = "float32"

  @nn.compact
  def __call__(self, image):
    image = jnp.asarray(image, self.dtype_mm)
    x = nn.Conv(
        8, (2, 2), strides=(2, 2),
        padding="VALID", name="embedding", dtype=self.dtype_mm)(image)
    n, h, w, c = x.shape
    x = jnp.reshape(x, [n, h * w, c])
    y = nn.LayerNorm()(x)
    y = nn.MultiHeadDotProductAttention(
        num_heads=2,
        kernel_init=nn.initializers.xavier_uniform(),
        deterministic=True,
        dtype=self.dtype_mm,
    )(y, y)
    x = x + y
    x = x + MlpBlock(mlp_dim=16, dtype_mm=self.dtype_mm)(nn.LayerNorm()(x))
    return nn.Dense(3, name="head")(x.mean(1))


def model() -> Any: return Model(dtype_mm="float32")


INPUTS = (np.linspace(-1, 1, 2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3),)

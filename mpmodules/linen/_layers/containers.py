"""Sequential: a module like any other, and so a boundary."""

from __future__ import annotations

import flax.linen as flax_nn

from mpmodules.linen._module import Module


class Sequential(Module, flax_nn.Sequential):
    """`flax.linen.Sequential` that carries a policy: its call is a boundary, as any module's is.

    Example:
      >>> layers = [linen.Dense(8), linen.relu, linen.Dense(3)]
      >>> model = linen.Sequential(layers, dtype_policy="mixed_bfloat16")
      >>> y, variables = model.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype('float32'))
    """

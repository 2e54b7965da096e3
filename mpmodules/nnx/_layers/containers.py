"""Sequential: a module like any other, and so a boundary."""

from __future__ import annotations

from flax import nnx as flax_nnx

from mpmodules.nnx._module import Module


class Sequential(Module, flax_nnx.Sequential):
    """`flax.nnx.Sequential` that carries a policy: its call is a boundary, as any module's is.

    Example:
      >>> with use_policy("mixed_bfloat16"):
      ...     dense = [nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))]
      ...     model = nnx.Sequential(dense[0], nnx.relu, dense[1])
      >>> y = model(jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype('float32'))
    """

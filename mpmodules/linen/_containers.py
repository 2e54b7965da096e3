"""Sequential: a module like any other, and so a boundary."""

from __future__ import annotations

import flax.linen as flax_nn

from mpmodules.linen._module import Module


class Sequential(Module, flax_nn.Sequential):
    """`flax.linen.Sequential` that carries a policy: its call is a boundary, as any module's is."""

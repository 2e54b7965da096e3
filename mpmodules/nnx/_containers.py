"""Sequential: a module like any other, and so a boundary."""

from __future__ import annotations

from flax import nnx as flax_nnx

from mpmodules.nnx._module import Module


class Sequential(Module, flax_nnx.Sequential):
    """`flax.nnx.Sequential` that carries a policy: its call is a boundary, as any module's is."""

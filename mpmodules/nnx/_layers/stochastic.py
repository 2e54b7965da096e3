"""Dropout, which returns compute_dtype under a policy."""

from __future__ import annotations

from typing import Any

from flax import nnx as flax_nnx

from mpmodules.calls.boundary import LayerCall
from mpmodules.nnx._layer import Layer
from policy.core.arrays import cast_array


class Dropout(Layer, flax_nnx.Dropout):
    """`flax.nnx.Dropout` that obeys policies: a floating input is cast to compute_dtype.

    Masks are Flax's own.

    Example:
      >>> layer = nnx.Dropout(0.5, deterministic=True, dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.ones((2, 4))).dtype
      dtype(bfloat16)
    """

    def _call_layer(self, call: LayerCall) -> Any:
        if call.policy is None:
            return call.run(self)
        inputs = cast_array(call.first(), call.policy.compute_dtype)
        return call.with_first(inputs).run(self)

"""Dropout, which returns compute_dtype under a policy."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as flax_nn

from mpmodules.calls.boundary import LayerCall
from mpmodules.linen._layer import Layer
from policy.core.arrays import cast_array


class Dropout(Layer, flax_nn.Dropout):
    """`flax.linen.Dropout` that obeys policies: a floating input is cast to compute_dtype.

    The masks are Flax's.

    Example:
      >>> layer = linen.Dropout(0.5, deterministic=True, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 4), dtype(bfloat16))
    """

    _dtype_fields: ClassVar[bool] = True

    def _call_layer(self, call: LayerCall) -> Any:
        if call.policy is None:
            return call.run(self)
        inputs = cast_array(call.first(), call.policy.compute_dtype)
        return call.with_first(inputs).run(self)

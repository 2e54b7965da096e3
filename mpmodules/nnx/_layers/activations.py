"""PReLU: the slope and its gradient in reduction_dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype

from mpmodules.calls.boundary import LayerCall
from mpmodules.functions import activations, functional
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._resolution import in_complex
from policy.core.arrays import cast_array


class PReLU(Layer, flax_nnx.PReLU):
    """`flax.nnx.PReLU` that obeys policies: the slope is kept in param_dtype, its gradient is
    summed wide.

    Under a policy a floating input is cast to compute_dtype, and so is the result. Half inputs are
    multiplied in reduction_dtype and rounded once.

    Example:
      >>> layer = nnx.PReLU(dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.asarray([-200.0, 3.0]))
      Array([-2, 3], dtype=bfloat16)
    """

    def _call_layer(self, call: LayerCall) -> Any:
        view = in_complex(self, call)
        if view is not None:
            return call.run(view)
        inputs = jnp.asarray(call.first())
        if self.dtype is not None and jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = cast_array(inputs, self.dtype)
        if self.promote_dtype is not promote_dtype or not functional.is_half(inputs.dtype):
            return call.run(self)
        return activations.prelu(inputs, self.negative_slope[...])

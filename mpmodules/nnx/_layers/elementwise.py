"""Layers without a matmul: PReLU, Dropout, and Sequential."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype

from mpmodules.calls.boundary import MethodCall
from mpmodules.functions.functional import is_half
from mpmodules.functions.reductions import prelu
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._module import Module
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

    def _call_layer(self, call: MethodCall) -> Any:
        view = in_complex(self, call)
        if view is not None:
            return call.run(view)
        inputs = jnp.asarray(call.first())
        if self.dtype is not None and jnp.issubdtype(inputs.dtype, jnp.floating):
            inputs = cast_array(inputs, self.dtype)
        if self.promote_dtype is not promote_dtype or not is_half(inputs.dtype):
            return call.run(self)
        return prelu(inputs, self.negative_slope[...])


class Dropout(Layer, flax_nnx.Dropout):
    """`flax.nnx.Dropout` that obeys policies: a floating input is cast to compute_dtype.

    Masks are Flax's own.

    Example:
      >>> layer = nnx.Dropout(0.5, deterministic=True, dtype_policy="p=f32,c=bf16")
      >>> layer(jnp.ones((2, 4))).dtype
      dtype(bfloat16)
    """

    def _call_layer(self, call: MethodCall) -> Any:
        if call.policy is None:
            return call.run(self)
        inputs = cast_array(call.first(), call.policy.compute_dtype)
        return call.with_first(inputs).run(self)


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

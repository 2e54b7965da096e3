"""Layers without a matmul: PReLU, Dropout, and Sequential."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as flax_nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_flax
from mpmodules.functions.functional import is_half
from mpmodules.functions.reductions import prelu
from mpmodules.linen._layer import Layer
from mpmodules.linen._module import Module
from mpmodules.linen._resolution import viewed
from policy.core.arrays import cast_array


class PReLU(Layer, flax_nn.PReLU):
    """`flax.linen.PReLU` that obeys policies: the slope is kept in param_dtype, its gradient is
    summed wide.

    Under a policy a floating input is cast to compute_dtype, and so is the result. Half inputs are
    multiplied in reduction_dtype and rounded once.

    Example:
      >>> layer = linen.PReLU(dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.asarray([-200.0, 3.0]))
      >>> y
      Array([-2, 3], dtype=bfloat16)
    """

    param_dtype: DTypeLike | None = None

    def _call_layer(self, call: MethodCall) -> Any:
        inputs = jnp.asarray(call.first())
        if call.policy is not None:
            inputs = cast_array(inputs, call.policy.compute_dtype)
        with viewed(self, self._policy_fields(call.policy)) as view:
            if not (is_half(inputs.dtype) and is_flax(call.method)):
                return call.with_first(inputs).run(view)
            slope = view.param(
                "negative_slope",
                lambda key: jnp.asarray(view.negative_slope_init, view.param_dtype),
            )
        return prelu(inputs, slope)


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

    def _call_layer(self, call: MethodCall) -> Any:
        if call.policy is None:
            return call.run(self)
        inputs = cast_array(call.first(), call.policy.compute_dtype)
        return call.with_first(inputs).run(self)


class Sequential(Module, flax_nn.Sequential):
    """`flax.linen.Sequential` that carries a policy: its call is a boundary, as any module's is.

    Example:
      >>> layers = [linen.Dense(8), linen.relu, linen.Dense(3)]
      >>> model = linen.Sequential(layers, dtype_policy="mixed_bfloat16")
      >>> y, variables = model.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype('float32'))
    """

"""Conv and ConvTranspose: convolutions in compute_dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from jax import lax
from jax.typing import DTypeLike

from mpmodules.functions import functional
from mpmodules.layers.operands import DetachedOperands, PromoteToAccumulator
from mpmodules.nnx._layers.linear import Matmul
from mpmodules.nnx._resolution import viewed
from policy.core.policy import Policy


class Conv(Matmul, flax_nnx.Conv):
    """`flax.nnx.Conv` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result.

    Example:
      >>> layer = nnx.Conv(2, 8, (3, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((1, 6, 6, 2)))
      >>> y.shape, y.dtype, layer.kernel[...].dtype
      ((1, 6, 6, 8), dtype(bfloat16), dtype('float32'))
    """

    _operation = "conv_general_dilated"
    _default_operations = (lax.conv_general_dilated,)
    _accumulating = staticmethod(functional.accumulating_conv)
    _scaled = staticmethod(functional.scaled_conv)


class ConvTranspose(Matmul, flax_nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    Its operation can't be replaced, but takes `preferred_element_type`; JAX can't transpose that
    where the operands are half. So Flax's method runs on operands without a gradient; the gradient
    is that of the same method in compute_dtype.

    Example:
      >>> layer = nnx.ConvTranspose(2, 8, (3,), 2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 12, 8), dtype(bfloat16))
    """

    def _call_accumulating(
        self,
        policy: Policy,
        dtype: DTypeLike,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict,
    ) -> Any:
        detached = DetachedOperands(PromoteToAccumulator(policy.compute_dtype, jnp.dtype(dtype)))

        def operation(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
            promote = lambda arrays, dtype=None, inexact=True: arrays  # noqa: E731
            without = {
                "bias": None,
                "use_bias": False,
                "mask": None,
                "preferred_element_type": None,
            }
            return method(
                viewed(self, kernel={...: kernel}, promote_dtype=promote, **without), inputs
            )

        y = method(
            viewed(self, promote_dtype=detached, preferred_element_type=dtype), *args, **kwargs
        )
        inputs = jnp.asarray(args[0] if args else kwargs["inputs"], policy.compute_dtype)
        return functional.with_operand_gradients(y, inputs, detached.kernel, operation)

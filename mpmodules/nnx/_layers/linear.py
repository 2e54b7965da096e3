"""Linear, LinearGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from mpmodules.layers.matmul_calls import Numerics, Product, linear, linear_general
from mpmodules.nnx._layer import Layer


class Matmul(Layer):
    """Base class of the matmul and convolution layers.

    The gradient of a half bias is summed in reduction_dtype.

    Attributes:
      _hook: the layer's attribute for an operation of the user's own, if it has one.
    """

    _hook: ClassVar[str] = ""

    def _product(
        self,
        operation: Callable[..., jax.Array],
        inputs: jax.Array,
        kernel: jax.Array | None = None,
    ) -> Product:
        """Promotes the operands of a call; see `Product`."""
        layer: Any = self
        kernel = layer.kernel[...] if kernel is None else kernel
        bias = None if layer.bias is None else layer.bias[...]
        promoted = layer.promote_dtype((inputs, kernel, bias), dtype=layer.dtype)
        if layer.promote_dtype is promote_dtype:
            numerics = self._numerics
        else:  # the user's own, as Flax has it
            numerics, bias = Numerics(), promoted[2]
        return Product(self, promoted, bias, operation, self._hook, numerics=numerics)


class Linear(Matmul, flax_nnx.Linear):
    """`flax.nnx.Linear` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result.

    Example:
      >>> layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype, layer.kernel[...].dtype
      ((2, 3), dtype(bfloat16), dtype('float32'))
    """

    _hook = "dot_general"

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies inputs (..., in) by the kernel, and adds the bias: (..., out)."""
        product = self._product(lax.dot_general, inputs)
        return linear(product, precision=self.precision, out_sharding=out_sharding)


class LinearGeneral(Matmul, flax_nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` that obeys policies; dtypes as in `Linear`.

    Example:
      >>> layer = nnx.LinearGeneral(4, (2, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((5, 4)))
      >>> y.shape, y.dtype
      ((5, 2, 3), dtype(bfloat16))
    """

    _hook = "dot_general"

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Contracts axes of inputs with the kernel, and adds the bias: (..., out...)."""
        product = self._product(lax.dot_general, inputs)
        options = {"precision": self.precision, "out_sharding": out_sharding}
        return linear_general(product, self.axis, tuple(self.batch_axis), **options)


class Einsum(Matmul, flax_nnx.Einsum):
    """`flax.nnx.Einsum` that obeys policies; dtypes as in `Linear`.

    Example:
      >>> layer = nnx.Einsum("bi,ij->bj", (4, 3), rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    _hook = "einsum_op"

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Contracts inputs with the kernel, as the equation says, and adds the bias.

        Args:
          inputs: the first operand of the equation.
          einsum_str: an equation of two operands; by default the layer's own.
          out_sharding: the sharding of the product; None leaves it to JAX.

        Raises:
          ValueError: neither the call nor the layer has an equation.
        """
        equation = self.einsum_str if einsum_str is None else einsum_str
        if equation is None:
            raise ValueError(
                "No `einsum_str` argument was provided to Einsum as either a __call__ argument, or "
                "class attribute."
            )
        equation = equation.replace(" ", "")
        self._einsum_str_check(equation)
        product = self._product(jnp.einsum, inputs)
        options = {"precision": self.precision, "out_sharding": out_sharding}
        y = product.multiply(before=(equation,), **options)
        if product.bias is None:
            return product.finish(y)
        operands = product.inputs, product.kernel
        return product.finish(y, self._infer_broadcasted_bias_shape(equation, *operands))

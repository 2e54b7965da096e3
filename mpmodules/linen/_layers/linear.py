"""Dense, DenseGeneral and Einsum: matmuls in compute_dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

from mpmodules.layers.matmul_calls import Numerics, Product, linear, linear_general
from mpmodules.linen._layer import Layer


class Matmul(Layer):
    """Base class of the matmul and convolution layers.

    The gradient of a half bias is summed in reduction_dtype.
    """

    param_dtype: DTypeLike | None = None

    @flax_nn.nowrap
    def _bias(self, shape: Sequence[int]) -> jax.Array | None:
        """Makes the bias, in a layer that has one."""
        return (
            self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
        )

    @flax_nn.nowrap
    def _product(
        self,
        operation: Callable[..., jax.Array],
        inputs: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None,
        hook: str = "",
        **options: Any,
    ) -> Product:
        """Promotes the operands of a call; see `Product`."""
        layer: Any = self
        promoted = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
        if layer.promote_dtype is promote_dtype:
            numerics = self._numerics
        else:  # the user's own, as Flax has it
            numerics, bias = Numerics(), promoted[2]
        return Product(self, promoted, bias, operation, hook, numerics=numerics, **options)


class Dense(Matmul, flax_nn.Dense):
    """`flax.linen.Dense` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result. A Dense that is a boundary with a wider output_dtype returns the matmul's
    accumulator.

    Example:
      >>> layer = linen.Dense(3, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, variables["params"]["kernel"].dtype
      ((2, 3), dtype(bfloat16), dtype('float32'))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Multiplies inputs (..., in) by the kernel, and adds the bias: (..., features)."""
        shape = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self._bias((self.features,))
        product = self._product(lax.dot_general, inputs, kernel, bias, "dot_general")
        return linear(product, precision=self.precision)


class DenseGeneral(Matmul, flax_nn.DenseGeneral):
    """`flax.linen.DenseGeneral` that obeys policies; dtypes as in `Dense`.

    Example:
      >>> layer = linen.DenseGeneral((2, 3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((5, 4)))
      >>> y.shape, y.dtype
      ((5, 2, 3), dtype(bfloat16))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Contracts axes of inputs with the kernel, and adds the bias: (..., features...)."""
        features, axis, batch_dims = (
            tuple(np.atleast_1d(np.asarray(given, int)).tolist())
            for given in (self.features, self.axis, self.batch_dims)
        )
        if set(batch_dims) != set(range(len(batch_dims))):
            raise ValueError(
                f"batch_dims {batch_dims} must be consecutive leading dimensions starting from 0."
            )
        batch = tuple(inputs.shape[i] for i in batch_dims)
        contracted = tuple(inputs.shape[i] for i in sorted(i % inputs.ndim for i in axis))
        n, size = math.prod(batch), math.prod(features)
        kernel = self.param(
            "kernel",
            _flattened(self.kernel_init, (n * math.prod(contracted), size)),
            (*batch, *contracted, *features),
            self.param_dtype,
        )
        bias = None
        if self.use_bias:
            init = _flattened(self.bias_init, (n * size,))
            bias = self.param("bias", init, (*batch, *features), self.param_dtype)
        product = self._product(lax.dot_general, inputs, kernel, bias, "dot_general")
        return linear_general(product, axis, batch_dims, precision=self.precision)


def _flattened(init: Callable[..., Any], flat: tuple[int, ...]) -> Callable[..., Any]:
    """Returns an initialiser that runs `init` for the shape `flat`, as Flax does."""

    def run(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        made = init(key, flat, dtype)
        if isinstance(made, meta.AxisMetadata):
            return meta.replace_boxed(made, jnp.reshape(made.unbox(), shape))
        return jnp.reshape(made, shape)

    return run


class Einsum(Matmul, flax_nn.Einsum):
    """`flax.linen.Einsum` that obeys policies; dtypes as in `Dense`.

    Example:
      >>> layer = linen.Einsum((4, 3), "bi,ij->bj", dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 4)))
      >>> y.shape, y.dtype
      ((2, 3), dtype(bfloat16))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Contracts inputs with the kernel, as the equation says, and adds the bias.

        The equation is given here or to the layer.
        """
        equation = flax_nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation:
            raise ValueError('`einsum_str` equation must be explicit and include "->".')
        if equation.count(",") != 1:
            raise ValueError(
                "`einsum_str` equation must have exactly two operands and therefore, exactly one "
                f"comma character, instead of {equation.count(',')}"
            )
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, added = None, None
        if self.use_bias:
            shape, added = self._get_bias_shape(equation, inputs, kernel)
            bias = self._bias(shape)
        product = self._product(jnp.einsum, inputs, kernel, bias)
        return product.finish(product.multiply(before=(equation,), precision=self.precision), added)

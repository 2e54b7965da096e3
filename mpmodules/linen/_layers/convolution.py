"""Conv, ConvLocal and ConvTranspose: convolutions in compute_dtype."""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as flax_nn
import jax
from jax import lax

from mpmodules.layers.matmul_calls import (
    convolve_transposed,
    kernel_size_of,
    masked,
    one_batch_axis,
    windows_of,
)
from mpmodules.linen._layers.linear import Matmul


class Conv(Matmul, flax_nn.Conv):
    """`flax.linen.Conv` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype,
    and so is the result. A Conv that is a boundary with a wider output_dtype returns the
    convolution's accumulator.

    Example:
      >>> layer = linen.Conv(8, (3, 3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 6, 2)))
      >>> y.shape, y.dtype, variables["params"]["kernel"].dtype
      ((1, 6, 6, 8), dtype(bfloat16), dtype('float32'))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in), and adds the bias."""
        size, groups = kernel_size_of(self), self.feature_group_count
        inputs, restored = one_batch_axis(inputs, len(size))
        windows = windows_of(self, inputs)
        assert inputs.shape[-1] % groups == 0
        shape = (*size, inputs.shape[-1] // groups, self.features)
        kernel = masked(self, self.param("kernel", self.kernel_init, shape, self.param_dtype))
        bias = self._bias((self.features,))
        product = self._product(
            lax.conv_general_dilated, windows.inputs, kernel, bias, "conv_general_dilated"
        )
        y = product.multiply(
            windows.strides,
            windows.padding,
            **windows.options,
            feature_group_count=groups,
            precision=self.precision,
        )
        return restored(product.finish(y))


class ConvLocal(Matmul, flax_nn.ConvLocal):
    """`flax.linen.ConvLocal` that obeys policies; dtypes as in `Conv`.

    JAX's operation has no accumulator to return: one that is a boundary with a wider output_dtype
    widens its result.

    Example:
      >>> layer = linen.ConvLocal(8, (3,), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 6, 8), dtype(bfloat16))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in) with a kernel of each place's own, and adds
        a bias of each place's own.
        """
        if self.feature_group_count != 1:
            raise NotImplementedError(
                "`lax.conv_general_dilated_local` does not support `feature_group_count != 1`, "
                f"got `{self.feature_group_count}`."
            )
        size = kernel_size_of(self)
        inputs, restored = one_batch_axis(inputs, len(size))
        windows, features = windows_of(self, inputs), inputs.shape[-1]
        convolve: Any = functools.partial(
            lax.conv_general_dilated,
            window_strides=windows.strides,
            padding=windows.padding,
            **windows.options,
        )
        shared = jax.ShapeDtypeStruct((*size, features, self.features), inputs.dtype)
        places = jax.eval_shape(convolve, windows.inputs, shared).shape[1:-1]
        shape = (*places, math.prod(size) * features, self.features)
        kernel = masked(self, self.param("kernel", self.kernel_init, shape, self.param_dtype))
        bias = self._bias((*places, self.features))
        product = self._product(
            lax.conv_general_dilated_local, windows.inputs, kernel, bias, accumulates=False
        )
        y = product.multiply(
            windows.strides,
            windows.padding,
            filter_shape=size,
            **windows.options,
            precision=self.precision,
        )
        return restored(product.finish(y))


class ConvTranspose(Matmul, flax_nn.ConvTranspose):
    """`flax.linen.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    Example:
      >>> layer = linen.ConvTranspose(8, (3,), strides=(2,), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 12, 8), dtype(bfloat16))
    """

    @flax_nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in) as a convolution's transpose, and adds the
        bias.
        """
        size = kernel_size_of(self)
        inputs, restored = one_batch_axis(inputs, len(size))
        channels = inputs.shape[-1], self.features
        shape = (*size, *(channels[::-1] if self.transpose_kernel else channels))
        kernel = masked(self, self.param("kernel", self.kernel_init, shape, self.param_dtype))
        product = self._product(lax.conv_transpose, inputs, kernel, self._bias((self.features,)))
        return restored(convolve_transposed(self, product))

"""Conv and ConvTranspose: convolutions in compute_dtype."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx as flax_nnx
from jax import lax

from mpmodules.layers.matmul_calls import convolve_transposed, masked, one_batch_axis, windows_of
from mpmodules.nnx._layers.linear import Matmul


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

    _hook = "conv_general_dilated"

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in), and adds the bias."""
        inputs, restored = one_batch_axis(inputs, len(self.kernel_size))
        windows = windows_of(self, inputs)
        assert self.in_features % self.feature_group_count == 0
        kernel = masked(self, self.kernel[...])
        product = self._product(lax.conv_general_dilated, windows.inputs, kernel)
        y = product.multiply(
            windows.strides,
            windows.padding,
            **windows.options,
            feature_group_count=self.feature_group_count,
            precision=self.precision,
            out_sharding=out_sharding,
        )
        return restored(product.finish(y))


class ConvTranspose(Matmul, flax_nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    Example:
      >>> layer = nnx.ConvTranspose(2, 8, (3,), 2, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> y = layer(jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 12, 8), dtype(bfloat16))
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves inputs (batch..., spatial..., in) as a convolution's transpose, and adds the
        bias.
        """
        inputs, restored = one_batch_axis(inputs, len(self.kernel_size))
        product = self._product(lax.conv_transpose, inputs, masked(self, self.kernel[...]))
        return restored(convolve_transposed(self, product))

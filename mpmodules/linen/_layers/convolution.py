"""Conv, ConvLocal and ConvTranspose: convolutions in compute_dtype."""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
from jax.typing import DTypeLike

from mpmodules.functions import functional
from mpmodules.linen._layers.linear import Accumulating, Biased, accumulator_fields
from mpmodules.linen._resolution import dtype_fields
from policy.core.policy import Policy


class Conv(Biased, flax_nn.Conv):
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

    param_dtype: DTypeLike | None = None

    def _policy_fields(
        self, policy: Policy | None, output_dtype: DTypeLike | None, method_name: str
    ) -> dict[str, Any]:
        return dtype_fields(self, policy) | accumulator_fields(
            self,
            policy,
            output_dtype,
            "conv_general_dilated",
            functional.accumulating_conv,
            functional.scaled_conv,
        )


class ConvLocal(Biased, flax_nn.ConvLocal):
    """`flax.linen.ConvLocal` that obeys policies; dtypes as in `Conv`.

    JAX's operation has no accumulator to return: one that is a boundary with a wider output_dtype
    widens its result.

    Example:
      >>> layer = linen.ConvLocal(8, (3,), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 6, 8), dtype(bfloat16))
    """

    param_dtype: DTypeLike | None = None


class ConvTranspose(Accumulating, flax_nn.ConvTranspose):
    """`flax.linen.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    Example:
      >>> layer = linen.ConvTranspose(8, (3,), strides=(2,), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((1, 6, 2)))
      >>> y.shape, y.dtype
      ((1, 12, 8), dtype(bfloat16))
    """

    param_dtype: DTypeLike | None = None

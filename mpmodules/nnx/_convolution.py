"""Conv and ConvTranspose: convolutions in compute_dtype."""

from __future__ import annotations

from flax import nnx as flax_nnx
from jax import lax

from mpmodules import functional
from mpmodules.nnx._linear import Matmul


class Conv(Matmul, flax_nnx.Conv):
    """`flax.nnx.Conv` that obeys policies.

    Kernel and bias are created in param_dtype; inputs, kernel and bias are cast to compute_dtype, and so is the result.
    """

    _operation = "conv_general_dilated"
    _default_operations = (lax.conv_general_dilated,)
    _accumulating = staticmethod(functional.accumulating_conv)


class ConvTranspose(Matmul, flax_nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` that obeys policies; dtypes as in `Conv`.

    JAX can't transpose a half convolution with a float32 result, and Flax gives this layer no hook for its operation:
    one that is a boundary with a wider output_dtype widens its result.
    """

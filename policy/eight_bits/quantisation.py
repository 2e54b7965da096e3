"""Arrays in 8 bits with float32 scales, computed from the array at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.core.matmul_dtypes import INT8, ScaledMatmul, backend, preferred
from policy.core.policy_warnings import warn_once

_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: its reciprocal is finite


def warn_if_emulated(
    by: ScaledMatmul, operation: Literal["matmuls", "convolutions"] = "matmuls"
) -> None:
    """Warns once if the backend has no 8-bit operation of this kind: it emulates one, slower.

    The numbers are the same. The backend is that of `policy.core.matmul_dtypes.backend`.
    """
    platform, kind = backend()
    has_it = preferred(platform, kind) == ("i8" if by.operands == INT8 else "f8")
    # GPUs from Turing on, and newer TPUs, multiply int8 too, though not faster than float8.
    has_it = has_it or (by.operands == INT8 and platform != "cpu")
    if not has_it or (operation == "convolutions" and platform != "tpu"):
        name = f"a GPU of compute capability {kind}" if kind[:1].isdigit() else kind
        warn_once(
            f"{name} has no {by.operands} {operation}, so they are emulated: the results are the "
            "same, but they run slower than in compute_dtype. "
            + (
                "m=8bit uses 8 bits only where the backend has them."
                if operation == "matmuls"
                else "A rule for the class of the layers excludes them."
            )
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """An array as 8-bit codes times a scale.

    Attributes:
      codes: the array divided by its scale, in float8 or int8; its shape.
      scale: float32, with size 1 along the axes that share a scale.
    """

    codes: jax.Array
    scale: jax.Array


def quantise(
    x: jax.Array, axes: Sequence[int], dtype: np.dtype, scaling: Literal["row", "tensor"] = "row"
) -> Quantised:
    """Returns an array in 8 bits.

    The scale is at least 2**-126, a power of two for float8, so that scaling is exact, and the
    quotient of the largest magnitude and 127 for int8. It is NaN where a number is not finite.

    Args:
      x: floating.
      axes: the axes that are contracted, which share a scale by "row".
      dtype: of the codes.
      scaling: "row", or "tensor" for one scale.
    """
    shared = tuple(range(x.ndim)) if scaling == "tensor" else tuple(axes)
    wide = x.astype(jnp.float32)
    largest = _largest_magnitude(wide, shared)
    if dtype == INT8:
        scale = jnp.maximum(largest / 127, _SMALLEST_SCALE)
        codes = jnp.clip(jnp.round(wide / scale), -127, 127)
    else:
        limit = float(jnp.finfo(dtype).max)
        scale = jnp.maximum(_next_power_of_two(largest / limit), _SMALLEST_SCALE)
        codes = jnp.clip(wide / scale, -limit, limit)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    return Quantised(codes.astype(dtype), scale)


def rescaled(product: jax.Array, *scales: jax.Array) -> jax.Array:
    """Returns a product of codes times the scales of its operands, in float32.

    The smaller scale comes first: the product of the codes and the scale of an operand of 1e37
    overflows, though the result may be small. Scales broadcast with the product.
    """
    return product * jnp.minimum(*scales) * jnp.maximum(*scales)


def _largest_magnitude(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest magnitude of a float32 along some axes, kept with size 1.

    It is NaN where there is one: XLA's maximum of floats leaves NaN out on CPUs. Bits of floats
    that are not negative have the order of the floats, and those of NaN come last.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True, initial=0), jnp.float32)


def _next_power_of_two(x: jax.Array) -> jax.Array:
    """Returns the smallest power of two that is not below a float32, of normal numbers exactly."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    mantissa = np.uint32(2**23 - 1)
    return lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)

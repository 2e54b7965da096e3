"""cuDNN's attention kernel for NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def fits_cudnn(
    query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None
) -> bool:
    """Returns whether the kernel takes these shapes and dtypes on this process's device, forward
    and backward.
    """
    width, lengths = query.shape[-1], (query.shape[-3], key.shape[-3])
    if (
        width > _widest_head()
        or width % 8
        or value.shape[-1] != width
        or 0 in query.shape + key.shape
    ):
        return False
    if bias is not None and bias.dtype != query.dtype:  # it would be rounded
        return False
    return (bias is None and mask is None) or not any(length % 2 for length in lengths)


def _widest_head() -> int:
    """Returns the widest head that the kernel takes on this process's device.

    0 where there is no such kernel.

    Source: cuDNN's documentation, "Fused flash attention": compute capability 8.0 and later, 256
    from 9.0 on.
    """
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():  # ROCm's are names
        return 0
    major = int(capability.split(".")[0])
    return 256 if major >= 9 else 128 if major >= 8 else 0


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None,
    mask: Array | None,
    is_causal: bool,
) -> Array:
    """Computes softmax(q k^T / sqrt(H) + bias) v in one kernel.

    Args:
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H), half precision.
      bias: added to the logits; broadcastable to (B..., N, T, S).
      mask: False (or 0) masks a pair out; broadcastable to (B..., N, T, S).
      is_causal: masks out the keys after each query.

    Returns:
      (B..., T, N, H) in the queries' dtype.
    """
    batch, logits_shape = (
        query.shape[:-3],
        (query.shape[-2], query.shape[-3], key.shape[-3]),
    )  # (N, T, S)
    if mask is not None:
        mask = _four_axes(jnp.asarray(mask).astype(bool), batch, logits_shape)
    if bias is not None:
        bias = _four_axes(bias, batch, logits_shape)
    out = jax.nn.dot_product_attention(
        *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        implementation="cudnn",
    )
    return out.reshape(query.shape)


def _four_axes(x: Any, batch: Sequence[int], logits_shape: tuple[int, int, int]) -> Array:
    """Broadcasts a bias or mask to (B, N, T, S); only B and N may stay 1."""
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    x = jnp.broadcast_to(x, (*x.shape[:-2], *logits_shape[1:]))
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(int(np.prod(batch)), *x.shape[-3:])

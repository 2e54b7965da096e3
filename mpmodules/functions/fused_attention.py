"""Chooses a fused attention kernel where one applies: cuDNN's on NVIDIA GPUs, splash attention on
TPUs.

Both keep logits and softmax in float32 and never write them to memory. They have no attention
weights to return, and take no dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from mpmodules.functions.splash_attention import LANES, Splash, StaticMask, splash_attention
from policy.functions.checkpointing import cached_inline_jit

Array = jax.Array
Attention = Callable[[Array, Array, Array], Array]

IMPLEMENTATIONS = (None, "xla", "cudnn", "splash")
_WIDEST_HEAD = 256  # the widest that splash attention is compiled for in the tests


def fused_kernel(
    implementation: str | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None,
    mask: Any,
    is_causal: bool,
    reduction_dtype: DTypeLike,
    precision: PrecisionLike = None,
    obstacles: dict[str, bool],
) -> Attention | None:
    """Chooses the kernel to compute attention with.

    With `implementation=None` there is one where nothing in `obstacles` is asked for, the kernel
    takes these shapes and dtypes, and arrays are whole: on one device, or within `shard_map`. (XLA
    can't partition splash attention, and cuDNN's refuses arrays that are sharded over heads or
    positions, which can't be seen while tracing.)

    - On an NVIDIA GPU, cuDNN's: float16 and bfloat16, with the device of this process.
    - On a TPU, splash attention: bfloat16, lengths that are multiples of 128, no bias. A mask other
      than causality must be known while tracing (a `numpy.ndarray`), be the same for the whole
      batch and leave each query a key. The platform is the one that the program is lowered for,
      not that of this process's devices.

    Args:
      implementation: None chooses, "xla", "cudnn" and "splash" insist.
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H).
      bias, mask: broadcastable to (B..., N, T, S), or None.
      is_causal: masks out the keys after each query.
      reduction_dtype: the dtype of logits and softmax.
      precision: None, which alone the kernels have.
      obstacles: other features that no kernel has, by name, and whether each is asked for.

    Returns:
      `attention(query, key, value)`, which is the kernel, or on a TPU the kernel and elsewhere
      XLA's program. None where it is XLA's on every platform.

    Raises:
      ValueError: an unknown `implementation`, or one that lacks a feature that is asked for.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8))  # float32, which no kernel takes
      >>> fused_attention.fused_kernel(
      ...     None, x, x, x, bias=None, mask=None, is_causal=False,
      ...     reduction_dtype=jnp.float32, obstacles={},
      ... ) is None
      True
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            "implementation should be None, 'xla', 'cudnn' or 'splash', but got "
            f"{implementation!r}."
        )
    if implementation == "xla":
        return None
    wide = jnp.dtype(reduction_dtype)
    obstacles = {f"reduction_dtype={wide.name}": wide != jnp.float32, **obstacles}
    obstacles["a precision"] = precision is not None
    cudnn = functools.partial(_cudnn_attention, bias=bias, mask=mask, is_causal=is_causal)
    is_half = query.dtype in (jnp.float16, jnp.bfloat16)
    if implementation == "cudnn":
        _refuse("cudnn", {f"{query.dtype.name} queries": not is_half, **obstacles})
        return cudnn
    insists = implementation == "splash"
    if not insists:
        if not is_half or any(obstacles.values()) or not _one_shard(query, key, value):
            return None
        if _fits_cudnn(query, key, value, bias, mask):
            return cudnn
    obstacles |= _splash_obstacles(query, key, value, bias)
    if not insists and any(obstacles.values()):
        return None  # without a look at the mask, which may be on a device
    static = None if mask is None else _static_mask(query, key, mask)
    obstacles |= {
        "a mask that is traced, or differs within the batch": mask is not None and static is None,
        "a mask that hides all keys from a query": _has_empty_row(static, is_causal),
    }
    if insists:
        _refuse("splash", obstacles)
    if any(obstacles.values()):
        return None
    how = Splash(None if static is None else StaticMask.of(static), is_causal, insists)
    return functools.partial(splash_attention, how) if insists else cached_inline_jit(_on_tpu, how)


def _refuse(implementation: str, obstacles: dict[str, bool]) -> None:
    refused = [name for name, asked_for in obstacles.items() if asked_for]
    if refused:
        raise ValueError(
            f"implementation={implementation!r} does not support {', '.join(refused)}. "
            "Leave it out, or give implementation='xla'."
        )


def _on_tpu(how: Splash, query: Array, key: Array, value: Array) -> Array:
    """Runs the kernel in a program that is lowered for TPUs, XLA's formula in others."""
    kernel = functools.partial(splash_attention, how)
    return lax.platform_dependent(query, key, value, tpu=kernel, default=how.formula)


def _splash_obstacles(
    query: Array, key: Array, value: Array, bias: Array | None
) -> dict[str, bool]:
    """Returns the features that splash attention lacks, by name, and whether each is asked for.

    Masks apart.
    """
    width, lengths = query.shape[-1], (query.shape[-3], key.shape[-3])
    return {
        f"{query.dtype.name} queries": query.dtype != jnp.bfloat16,  # Mosaic loads no float16
        "a bias": bias is not None,
        f"{lengths[0]} queries and {lengths[1]} keys (both should be multiples of {LANES})": any(
            length % LANES or not length for length in lengths
        ),
        f"heads of width {width} (at most {_WIDEST_HEAD})": not 0 < width <= _WIDEST_HEAD,
        "values that differ in shape from the keys": key.shape != value.shape,
        "operands that vary over different axes of shard_map": len(
            {_varies_over(x) for x in (query, key, value)}
        )
        > 1,
    }


def _varies_over(x: Array) -> Any:
    aval = jax.typeof(x)
    return getattr(aval, "mat", getattr(aval, "vma", None))


def _static_mask(query: Array, key: Array, mask: Any) -> np.ndarray | None:
    """Returns a mask as (1 or N, T, S) where it is known while tracing and the same for the whole
    batch; else None.
    """
    if isinstance(mask, Tracer) or not getattr(mask, "is_fully_addressable", True):
        return None
    mask = np.asarray(mask).astype(bool)
    mask = mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
    if any(size != 1 for size in mask.shape[:-3]):
        return None
    return np.broadcast_to(
        mask.reshape(mask.shape[-3:]), (mask.shape[-3], query.shape[-3], key.shape[-3])
    )


def _has_empty_row(mask: np.ndarray | None, is_causal: bool) -> bool:
    """Returns whether a query has no key left: its weights are uniform in our definition, not in
    the kernel's.
    """
    if mask is None:
        return False
    allowed = np.logical_and(mask, np.tri(*mask.shape[-2:], dtype=bool)) if is_causal else mask
    return not allowed.any(-1).all()


def _one_shard(*arrays: Array) -> bool:
    """Returns whether arrays are whole while tracing: on one device, or with every axis of the mesh
    in `shard_map`.

    The mesh of the arrays decides where they have one: a program compiled for a topology has other
    devices than this process.
    """
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
    meshes = [mesh for mesh in meshes if not mesh.empty]
    for mesh in meshes:
        is_manual = all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)
        if mesh.size > 1 and not is_manual:
            return False
    return bool(meshes) or jax.device_count() == 1


# --------------------------------------------------------------------------------------------------
# cuDNN's kernel for NVIDIA GPUs, through `jax.nn.dot_product_attention`
# --------------------------------------------------------------------------------------------------


def _fits_cudnn(
    query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None
) -> bool:
    """Returns whether the kernel takes these shapes and dtypes on this process's device, forward
    and backward.
    """
    width, lengths = query.shape[-1], (query.shape[-3], key.shape[-3])
    if width > _widest_head() or width % 8 or value.shape[-1] != width:
        return False
    if 0 in query.shape + key.shape:
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


def _cudnn_attention(
    query: Array, key: Array, value: Array, *, bias: Array | None, mask: Any, is_causal: bool
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
    batch, lengths = query.shape[:-3], (query.shape[-3], key.shape[-3])
    if mask is not None:
        mask = _four_axes(jnp.asarray(mask).astype(bool), batch, lengths)
    if bias is not None:
        bias = _four_axes(bias, batch, lengths)
    out = jax.nn.dot_product_attention(
        *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        implementation="cudnn",
    )
    return out.reshape(query.shape)


def _four_axes(x: Any, batch: Sequence[int], lengths: tuple[int, int]) -> Array:
    """Broadcasts a bias or mask to (B, N, T, S); only B and N may stay 1."""
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    x = jnp.broadcast_to(x, (*x.shape[:-2], *lengths))
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(int(np.prod(batch)), *x.shape[-3:])

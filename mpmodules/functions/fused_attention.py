"""Chooses a fused attention kernel where one applies: cuDNN's on NVIDIA GPUs, splash attention on
TPUs.

Both keep logits and softmax in float32 and never write them to memory. They have no attention
weights to return, and take no dropout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mpmodules.functions.attention_masks import KnownMask, known_mask
from mpmodules.functions.cudnn_attention import cudnn_attention, widest_head
from mpmodules.functions.sharded_attention import Shards, shards_of
from mpmodules.functions.splash_attention import Splash, mask_and_window, splash_attention
from mpmodules.functions.splash_kernel import CAUSAL, LANES
from policy.core.scope import current_scope, require_attention_axes
from policy.functions.checkpointing import cached_inline_jit

Array = jax.Array
Operands = tuple[Array, Array, Array]
Attention = Callable[[Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The program that computes an attention.

    Attributes:
      attend: `attend(query, key, value)`, a kernel, or on a TPU the kernel and elsewhere XLA's
        formula; None where it is XLA's formula on every platform.
      reason: the kernel's name, "cudnn" or "splash"; else the features that no kernel has.

    Example:
      >>> fused_attention.Choice(None, "float32 queries").attend is None
      True
    """

    attend: Attention | None
    reason: str

    @property
    def program(self) -> str:
        """The text of an audit."""
        return self.reason if self.attend else f"XLA: {self.reason}"


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
    soft_cap: float | None = None,
    attention_axes: PartitionSpec | None = None,
    obstacles: dict[str, bool],
) -> Choice:
    """Chooses the kernel to compute attention with.

    With `implementation=None` there is one where nothing in `obstacles` is asked for, and the
    kernel takes these shapes and dtypes. Over several devices it runs in `jax.shard_map` over the
    axes of batch and heads; see `mpmodules.functions.sharded_attention.shards_of`.

    - On an NVIDIA GPU, cuDNN's: float16 and bfloat16, with the device of this process, or the one
      that `policy.estimate` traces for.
    - On a TPU, splash attention: bfloat16, lengths that are multiples of 128, no bias. A mask other
      than causality must be known while tracing; see
      `mpmodules.functions.attention_masks.known_mask`. The platform is the one that the program is
      lowered for, not that of this process's devices.

    Args:
      implementation: None chooses, "xla", "cudnn" and "splash" insist.
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H).
      bias, mask: broadcastable to (B..., N, T, S), or None.
      is_causal: masks out the keys after each query.
      reduction_dtype: the dtype of logits and softmax.
      precision: None, which alone the kernels have.
      soft_cap: limits the logits, or None; cuDNN's kernel has none.
      attention_axes: the mesh axes of queries, (B, T, N, H); None for those of the policy's scope.
      obstacles: other features that no kernel has, by name, and whether each is asked for.

    Raises:
      ValueError: an unknown `implementation`, one that lacks a feature that is asked for, or
        `attention_axes` that the mesh does not have.
      TypeError: `attention_axes` is no `PartitionSpec`.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8))  # float32, which no kernel takes
      >>> choice = fused_attention.fused_kernel(
      ...     None, x, x, x, bias=None, mask=None, is_causal=False,
      ...     reduction_dtype=jnp.float32, obstacles={},
      ... )
      >>> choice.attend is None, choice.reason
      (True, 'float32 queries')
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            "implementation should be None, 'xla', 'cudnn' or 'splash', but got "
            f"{implementation!r}."
        )
    axes = require_attention_axes(attention_axes) or current_scope().attention_axes
    if implementation == "xla":
        return Choice(None, "implementation='xla'")
    wide = jnp.dtype(reduction_dtype)
    is_half = query.dtype in (jnp.float16, jnp.bfloat16)
    obstacles = {
        f"{query.dtype.name} queries": not is_half,
        f"reduction_dtype={wide.name}": wide != jnp.float32,
        **obstacles,
        "a precision": precision is not None,
    }
    if any(obstacles.values()) and implementation is None:
        return Choice(None, _listed(obstacles))
    shards, obstacle = shards_of(query, key, value, axes)
    obstacles = {**obstacles, obstacle: bool(obstacle)}
    if implementation == "cudnn":
        _reject("cudnn", {**obstacles, "a soft cap": soft_cap is not None})
    insists = implementation == "splash"
    may_be_cudnn = not (insists or soft_cap is not None or any(obstacles.values()))
    if may_be_cudnn and (implementation == "cudnn" or _fits_cudnn(query, key, value, bias, mask)):
        return Choice(_cudnn(query, key, bias, mask, is_causal, shards), "cudnn")
    obstacles |= _splash_obstacles(query, key, value, bias)
    kinds = {_varies_over(x) for x in (query, key, value)}
    obstacles["operands that vary over different axes of shard_map"] = len(kinds) > 1
    pairs = KnownMask()
    if mask is not None and not any(obstacles.values()):  # else not read: it may be on a device
        pairs, of_mask = _known_pairs(mask, query, key, shards)
        obstacles |= of_mask
    if insists:
        _reject("splash", obstacles)
    if any(obstacles.values()):
        return Choice(None, _listed(obstacles))
    how = Splash(*mask_and_window(pairs.static, is_causal), insists, soft_cap, shards)
    hides = _may_hide_all_keys(how, pairs, query.shape[-3], key.shape[-3])
    kernel: Any = _kernel_with_uniform_rows if hides else splash_attention
    return Choice(_splash(kernel, how, pairs.ids), "splash")


def _known_pairs(
    mask: Any, query: Array, key: Array, shards: Shards | None
) -> tuple[KnownMask, dict[str, bool]]:
    """Returns a mask as it is known while tracing, and what of it keeps splash attention away."""
    found = known_mask(mask, query, key)
    pairs = found or KnownMask()
    by_head = pairs.static is not None and len(pairs.static) > 1
    split = shards is not None and bool(shards.heads)
    unknown = "a mask that is not known while tracing, or differs within the batch"
    by_shard = "a mask that differs between heads, which are sharded"
    return pairs, {unknown: found is None, by_shard: by_head and split}


def _listed(obstacles: dict[str, bool]) -> str:
    return ", ".join(name for name, asked_for in obstacles.items() if asked_for)


def _reject(implementation: str, obstacles: dict[str, bool]) -> None:
    if any(obstacles.values()):
        raise ValueError(
            f"implementation={implementation!r} does not support {_listed(obstacles)}. "
            "Leave it out, or give implementation='xla'."
        )


# --------------------------------------------------------------------------------------------------
# Splash attention, for TPUs
# --------------------------------------------------------------------------------------------------


def _splash(kernel: Callable[..., Array], how: Splash, ids: tuple[Array, ...]) -> Attention:
    """Returns splash attention of the pairs that are kept."""
    run: Any = functools.partial(kernel, how)
    if not how.insists:
        run = cached_inline_jit(_on_tpu, kernel, how)
    return lambda *operands: run(*_repeated(how.shards, *operands), *ids)


def _on_tpu(kernel: Callable[..., Array], how: Splash, *operands: Array) -> Array:
    """Runs the kernel in a program that is lowered for TPUs, XLA's formula in others."""
    run = functools.partial(kernel, how)
    return lax.platform_dependent(*operands, tpu=run, default=how.formula)


def _kernel_with_uniform_rows(
    how: Splash, query: Array, key: Array, value: Array, *ids: Array
) -> Array:
    """Computes attention where a query without any key weighs all keys alike, as in our definition
    and not in the kernel's.
    """
    allowed = how.allowed(query, key, *ids)
    has_key = jnp.swapaxes(jnp.any(allowed, axis=-1), -1, -2)[..., None]  # (B..., T, 1 or N, 1)
    mean = jnp.mean(value, axis=-3, keepdims=True, dtype=jnp.float32).astype(value.dtype)
    mean = jnp.repeat(mean, query.shape[-2] // key.shape[-2], axis=-2)
    return jnp.where(has_key, splash_attention(how, query, key, value, *ids), mean)


def _may_hide_all_keys(how: Splash, pairs: KnownMask, queries: int, keys: int) -> bool:
    """Returns whether a query may have no key left."""
    static, before = None if how.mask is None else how.mask.array, how.window[0]
    if static is not None and not static.any(-1).all():
        return True
    if before is not None and queries - before > keys:
        return True
    has_own = static is None or bool(np.diagonal(static, axis1=1, axis2=2).all())
    return bool(pairs.ids) and not (pairs.reflexive and has_own)  # a window keeps its own position


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
    }


def _varies_over(x: Array) -> Any:
    aval = jax.typeof(x)
    return getattr(aval, "mat", getattr(aval, "vma", None))


# --------------------------------------------------------------------------------------------------
# cuDNN's kernel for NVIDIA GPUs
# --------------------------------------------------------------------------------------------------


def _fits_cudnn(
    query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None
) -> bool:
    """Returns whether the kernel takes these shapes and dtypes, forward and backward."""
    width, lengths = query.shape[-1], (query.shape[-3], key.shape[-3])
    if width > widest_head() or width % 8 or value.shape[-1] != width:
        return False
    if 0 in query.shape + key.shape:
        return False
    if bias is not None and bias.dtype != query.dtype:  # it would be rounded
        return False
    return (bias is None and mask is None) or not any(length % 2 for length in lengths)


def _cudnn(
    query: Array, key: Array, bias: Array | None, mask: Any, is_causal: bool, shards: Shards | None
) -> Attention:
    """Returns cuDNN's attention. A mask that is known while tracing to be causality is given as
    such: the kernel then skips blocks, where it adds other masks to all logits.
    """
    pairs = None if mask is None else known_mask(mask, query, key)
    if pairs is not None and not pairs.ids:
        static, window = mask_and_window(pairs.static, is_causal)
        if static is None and window in (CAUSAL, (None, None)):
            mask, is_causal = None, window == CAUSAL
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    given = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    biases = [x.reshape((1,) * (query.ndim - x.ndim) + x.shape) for x in given.values()]
    kernel = functools.partial(cudnn_attention, tuple(given), is_causal)
    if shards is None:
        return lambda *operands: kernel(*operands, *biases)
    # JAX's kernel does not say over which axes its results vary.
    run = functools.partial(shards.map, kernel, results=query.ndim, biases=biases, checks=False)
    return lambda *operands: run(_repeated(shards, *operands))


def _repeated(shards: Shards | None, query: Array, key: Array, value: Array) -> Operands:
    """Returns queries, keys and values with as many key heads as the shards of heads need."""
    if shards is None or shards.repeats == 1:
        return query, key, value
    key, value = (jnp.repeat(x, shards.repeats, axis=-2) for x in (key, value))
    return query, key, value

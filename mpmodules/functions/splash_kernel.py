"""JAX's splash attention, forward and backward, over arrays of (B..., T, N, H).

Of its masks, causality and windows are computed in the kernel; others are tables of blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Three = tuple[Array, Array, Array]

LANES = 128  # block lengths are multiples of it
# The longest block whose float32 logits leave room for the others in a core's vector memory.
_BLOCK = 512
_LONGEST_KEYS = 2048  # up to which keys and values stay in that memory while backward reads them
_WIDEST_KEYS = 128  # the widest head for which they do


Window = tuple[int | None, int | None]
CAUSAL: Window = (None, 0)


@dataclasses.dataclass(frozen=True)
class StaticMask:
    """A mask known while tracing, hashable by its contents.

    Attributes:
      bits: `numpy.packbits` of it.
      shape: (1 or N, T, S).
    """

    bits: bytes
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, mask: np.ndarray) -> StaticMask:
        heads, queries, keys = mask.shape
        return cls(np.packbits(mask).tobytes(), (heads, queries, keys))

    @property
    def array(self) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=math.prod(self.shape))
        return bits.astype(bool).reshape(self.shape)


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Traces JAX's kernel as it was written: 32-bit indices, standard promotion."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def _forward(
    query: Array, key: Array, value: Array, *ids: Array, save_residuals: bool = False, **how: Any
) -> list[Array]:
    """Computes softmax(q k^T / sqrt(H)) v: (B..., T, N, H).

    Args:
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H).
      ids: of queries (B..., T) and of keys (B..., S), or nothing.
      save_residuals: returns the logarithms of the softmax's denominators, too: (B..., N, T) in
        float32.
      **how: `mask`, `window`, `soft_cap` and `interpret`; see `_kernel`.
    """
    lengths = _lengths(query, key)
    kernel = _kernel(lengths, query.shape[-1], save_residuals=save_residuals, **how)
    with _as_written():
        attend = lambda inputs, segments: kernel(*inputs, **segments)  # noqa: E731
        inputs = (_scaled(query), *map(_heads_first, (key, value)))
        found = jax.vmap(attend)(inputs, _segments(ids))
        if not save_residuals:
            return [_heads_last(found, query)]
        out, (log_sum,) = found
        return [_heads_last(out, query), log_sum.reshape(*query.shape[:-3], *log_sum.shape[1:])]


def _backward_kernel(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    log_sum: Array,
    cotangent: Array,
    *ids: Array,
    **how: Any,
) -> Three:
    """Computes the cotangents of queries, keys and values, from the results of
    `_forward`.
    """
    kernel = _kernel(_lengths(query, key), query.shape[-1], **how)
    with _as_written():
        inputs = [_scaled(query), _heads_first(key), _heads_first(value)]
        log_sum = log_sum.reshape(-1, *log_sum.shape[-2:])
        outs, cotangents = _heads_first(out), _heads_first(cotangent)
        pull = functools.partial(_pullback, kernel)
        grads = jax.vmap(pull)(inputs, _segments(ids), outs, log_sum, cotangents)
        d_query = (grads[0].astype(jnp.float32) * _scale(query)).astype(query.dtype)
        return _heads_last(d_query, query), _heads_last(grads[1], key), _heads_last(grads[2], value)


def _pullback(
    kernel: Callable[..., Array],
    inputs: Sequence[Array],
    segments: dict[str, Any],
    out: Array,
    log_sum: Array,
    cotangent: Array,
) -> tuple[Array, ...]:
    """Applies the kernel's pullback to `cotangent`, with `out` and `log_sum` as residuals: forward
    is not run again.

    Raises:
      NotImplementedError: JAX's kernel has other residuals.
    """
    program, shapes = jax.make_jaxpr(
        lambda inputs, segments: jax.vjp(lambda *x: kernel(*x, **segments), *inputs),
        return_shape=True,
    )(inputs, segments)
    jaxpr: Any = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, jax.tree.leaves((inputs, segments)), strict=True))
    known[jaxpr.outvars[0]] = out
    leaves = []
    for atom in jaxpr.outvars[1:]:
        if hasattr(atom, "val"):
            leaves.append(atom.val)
        elif atom in known:
            leaves.append(known[atom])
        elif (atom.aval.shape, atom.aval.dtype) == (log_sum.shape, log_sum.dtype):
            leaves.append(log_sum)
        else:
            raise NotImplementedError(
                f"JAX's splash attention keeps {atom.aval} for backward, which is not known here."
            )
    _, pull = jax.tree.unflatten(jax.tree.structure(shapes), [out, *leaves])
    return pull(cotangent)


def _scale(query: Array) -> np.ndarray:
    return np.asarray(1 / math.sqrt(query.shape[-1]), np.float32)


def _scaled(query: Array) -> Array:
    """Divides the queries by sqrt(H), heads first; exact where that is a power of two."""
    return _heads_first((query.astype(jnp.float32) * _scale(query)).astype(query.dtype))


def _heads_first(x: Array) -> Array:
    """Reshapes (B..., T, N, H) to (B, N, T, H)."""
    return jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)


def _heads_last(x: Array, like: Array) -> Array:
    return jnp.swapaxes(x, 1, 2).reshape(like.shape)


def _segments(ids: Sequence[Array]) -> dict[str, Any]:
    """Returns the ids of (B..., T) and (B..., S) as JAX's kernel takes them, of (B, T), (B, S)."""
    if not ids:
        return {}
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return {"segment_ids": splash.SegmentIds(*(x.reshape(-1, x.shape[-1]) for x in ids))}


def _lengths(query: Array, key: Array) -> tuple[int, int, int]:
    return query.shape[-2], query.shape[-3], key.shape[-3]  # (N, T, S)


@functools.lru_cache(maxsize=64)
def _kernel(
    lengths: tuple[int, int, int],
    width: int,
    *,
    mask: StaticMask | None,
    window: Window,
    soft_cap: float | None,
    interpret: bool,
    save_residuals: bool = False,
) -> Callable[..., Any]:
    """Makes JAX's kernel for one example: (N, T, H), (K, S, H), (K, S, H) -> (N, T, H).

    It is cached here: the kernel's own caches compare masks by identity.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, queries, keys = lengths
    if mask is not None:
        masks = [splash.NumpyMask(each) for each in np.broadcast_to(mask.array, lengths)]
    elif window == (None, None):
        masks = [splash.FullMask((queries, keys))] * heads
    elif window == CAUSAL:
        masks = [splash.CausalMask((queries, keys))] * heads
    else:
        masks = [splash.LocalMask((queries, keys), window, 0)] * heads
    is_full = mask is None and window == (None, None)
    sizes = _block_sizes(queries, keys, width, is_full=is_full)
    with jax.ensure_compile_time_eval(), _as_written():
        made = splash.make_splash_mha_single_device(
            splash.MultiHeadMask(masks),
            block_sizes=sizes,
            attn_logits_soft_cap=soft_cap,
            save_residuals=save_residuals,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, made)


def _block_sizes(queries: int, keys: int, width: int, *, is_full: bool) -> Any:
    """Chooses blocks of up to 512 queries by 512 keys.

    Where all keys fit in one block of backward, one kernel returns all three gradients and reads
    the logits' operands once. Masked blocks can be skipped only where there are several.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block_q, block_kv = _block(queries), _block(keys)
    together = keys == block_kv or (is_full and keys <= _LONGEST_KEYS and width <= _WIDEST_KEYS)
    layout = splash.QKVLayout.SEQ_MINOR if width < LANES else splash.QKVLayout.HEAD_DIM_MINOR
    return splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=keys if together else block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=None if together else block_q,
        block_kv_dq=None if together else block_kv,
        use_fused_bwd_kernel=together,
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
    )


def _block(length: int) -> int:
    return next(size for size in range(_BLOCK, 0, -LANES) if length % size == 0)


STAGES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "forward_with_residuals": functools.partial(_forward, save_residuals=True),
    "backward": _backward_kernel,
}

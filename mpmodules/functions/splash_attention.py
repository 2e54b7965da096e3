"""Splash attention for TPUs: JAX's kernel as a primitive, which is batched, and traced when it is
lowered for a TPU, not before: a program for other platforms never imports the kernel.

JAX's kernel has a `custom_vjp` that is traced in the caller's contexts. Here forward and backward
are two calls of the primitive, whose own derivative is that of XLA's formula.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from mpmodules.functions.attention import dot_product_attention
from mpmodules.functions.sharded_attention import Shards
from mpmodules.functions.splash_kernel import CAUSAL, STAGES, StaticMask, Window

Array = jax.Array

RESIDUALS = "attention"
"""The name of what backward keeps, as in `jax.checkpoint_policies.save_only_these_names`."""

INTERPRET = False  # True in tests: Pallas's interpreter, on any platform


@dataclasses.dataclass(frozen=True)
class Splash:
    """The static parameters of one attention.

    Attributes:
      mask: the pairs that are kept; None keeps all.
      window: the numbers of keys before and after its own position that a query attends to; None
        for all of them. It applies beside `mask`, and the kernel computes it.
      insists: lowers to the kernel or not at all, rather than to XLA's formula where the kernel
        can't be partitioned.
      soft_cap: limits the logits, or None; as in
        `mpmodules.functions.attention.dot_product_attention_weights`.
      shards: how the operands are split over a mesh, or None where they are whole.
    """

    mask: StaticMask | None
    window: Window
    insists: bool
    soft_cap: float | None = None
    shards: Shards | None = None

    def formula(self, query: Array, key: Array, value: Array, *ids: Array) -> Array:
        """Computes the same attention by XLA's operations.

        Args:
          query: (B..., T, N, H); `key` and `value`: (B..., S, K, H).
          ids: those of queries (B..., T) and of keys (B..., S), or nothing.
        """
        is_causal = self.window == CAUSAL
        how = dataclasses.replace(self, window=(None, None)) if is_causal else self
        is_whole = how.mask is None and how.window == (None, None) and not ids
        mask: Any = None if is_whole else how.allowed(query, key, *ids)
        return dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            reduction_dtype=jnp.float32,
            soft_cap=self.soft_cap,
        )

    def allowed(self, query: Array, key: Array, *ids: Array) -> Array:
        """Returns the pairs that are kept, broadcastable to (B..., N, T, S)."""
        queries, keys = query.shape[-3], key.shape[-3]
        masks: list[Any] = [] if self.mask is None else [self.mask.array]
        if self.window != (None, None):
            masks.append(_in_window(self.window, queries, keys))
        if ids:
            same = ids[0][..., :, None] == ids[1][..., None, :]
            masks.append(same[..., None, :, :])
        # Of equal ranks: under strict promotion arrays of different ones don't combine.
        masks = [m.reshape((1,) * (query.ndim - m.ndim) + m.shape) for m in masks]
        return functools.reduce(jnp.logical_and, masks)


def mask_and_window(
    allowed: np.ndarray | None, is_causal: bool
) -> tuple[StaticMask | None, Window]:
    """Returns `mask` and `window` of `Splash` for a mask (1 or N, T, S) or none, and causality."""
    if allowed is None:
        return None, CAUSAL if is_causal else (None, None)
    if is_causal:
        allowed = np.logical_and(allowed, np.tri(*allowed.shape[-2:], dtype=bool))
    window = _window_of(allowed)
    return (StaticMask.of(allowed), (None, None)) if window is None else (None, window)


def _in_window(window: Window, queries: int, keys: int, numpy: Any = jnp) -> Any:
    """Returns the mask of a window, (T, S), as an array of `jax.numpy` or NumPy."""
    before, after = window
    ahead = numpy.arange(keys, dtype=np.int32)[None, :]
    ahead = ahead - numpy.arange(queries, dtype=np.int32)[:, None]
    inside = numpy.ones((queries, keys), bool)
    inside = inside if before is None else inside & (ahead >= -before)
    return inside if after is None else inside & (ahead <= after)


def _window_of(allowed: np.ndarray) -> Window | None:
    """Returns the window that a mask (1 or N, T, S) is, or None."""
    heads, queries, keys = allowed.shape
    after, before = int(allowed[0, 0].sum()) - 1, int(allowed[0, :, 0].sum()) - 1
    if heads != 1 or after < 0 or before < 0:
        return None
    window = None if before == queries - 1 else before, None if after == keys - 1 else after
    return window if np.array_equal(_in_window(window, queries, keys, np), allowed[0]) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def splash_attention(how: Splash, query: Array, key: Array, value: Array, *ids: Array) -> Array:
    """Computes softmax(q k^T / sqrt(H)) v in one kernel.

    Its residuals are named "attention", for the policies of `jax.checkpoint`.

    Args:
      how: the masks, and whether to insist on the kernel.
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H), K a divisor of N.
      ids: those of queries (B..., T) and of keys (B..., S), int32, or nothing: a query attends to
        the keys with its own id. Of a query without any key the result has no meaning.

    Returns:
      (B..., T, N, H) in the queries' dtype.
    """
    (out,) = _run(how, "forward", query, key, value, *ids)
    return out


def _forward(
    how: Splash, query: Array, key: Array, value: Array, *ids: Array
) -> tuple[Array, tuple[Array, ...]]:
    results = _run(how, "forward_with_residuals", query, key, value, *ids)
    out, log_sum = (checkpoint_name(x, RESIDUALS) for x in results)
    return out, (query, key, value, out, log_sum, *ids)


def _backward(how: Splash, residuals: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
    kept, ids = residuals[:5], residuals[5:]
    return (*_run(how, "backward", *kept, cotangent, *ids), *[None] * len(ids))


splash_attention.defvjp(_forward, _backward)


# --------------------------------------------------------------------------------------------------
# The kernel as a primitive
# --------------------------------------------------------------------------------------------------

_kernel_p = jex_core.Primitive("splash_attention")
_kernel_p.multiple_results = True

_ELSEWHERE = {
    True: ("that XLA can't partition", "Call it within jax.shard_map, or leave it out"),
    False: ("for TPUs", "Leave it out, or give implementation='xla'"),
}


def _run(how: Splash, stage: str, *operands: Array) -> list[Array]:
    """Runs a stage of the kernel, on each shard where the operands are sharded.

    `jax.shard_map` stands inside of the derivatives, so it need not be differentiated.
    """
    whole = dataclasses.replace(how, shards=None)
    run = functools.partial(_kernel_p.bind, how=whole, stage=stage)
    if how.shards is None:
        return run(*operands)
    rank = operands[0].ndim
    results = {"forward": [rank], "forward_with_residuals": [rank, rank - 1]}
    return how.shards.map(run, operands, results.get(stage, [rank] * 3))


@_kernel_p.def_abstract_eval
def _kernel_avals(query: Any, key: Any, value: Any, *_: Any, how: Splash, stage: str) -> list[Any]:
    if stage == "backward":
        return [query, key, value]
    if stage == "forward":
        return [query]
    *batch, queries, heads, _ = query.shape
    shape = (*batch, heads, queries)  # of the logarithms of the softmax's denominators
    sharding = query.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return [query, query.update(shape=shape, dtype=jnp.dtype(jnp.float32), sharding=sharding)]


@functools.lru_cache(maxsize=256)
def _program(
    how: Splash, stage: str, operands: tuple[jax.ShapeDtypeStruct, ...], interpret: bool
) -> Any:
    """Traces the kernel to a jaxpr.

    It is traced in a thread of its own, where no context of the caller's holds: within `shard_map`,
    JAX's kernel does not say over which axes its outputs vary. Its `_kernel_avals` here do.
    """
    run = functools.partial(
        STAGES[stage], mask=how.mask, window=how.window, soft_cap=how.soft_cap, interpret=interpret
    )
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(jax.make_jaxpr(run), *operands).result()


def _run_formula(*operands: Array, how: Splash, stage: str) -> list[Array]:
    """XLA's formula, for the outputs that its backward needs: it computes the softmax again."""
    if stage == "backward":
        ids = operands[6:]
        run = lambda *operands: how.formula(*operands, *ids)  # noqa: E731
        return list(jax.vjp(run, *operands[:3])[1](operands[5]))
    out = how.formula(*operands)
    if stage == "forward":
        return [out]
    *batch, queries, heads, _ = operands[0].shape
    return [out, jnp.zeros((*batch, heads, queries), jnp.float32)]


def _lower(context: Any, *operands: Any, how: Splash, stage: str, is_for_tpu: bool) -> Any:
    """Lowers to the kernel, or to XLA's formula: in a program that XLA partitions, because Mosaic's
    kernels can't be, and for other platforms, because a program for several has the branch for TPUs
    lowered for all of them.
    """
    if _is_whole(context.module_context.axis_context) if is_for_tpu else INTERPRET:
        return _lower_kernel(context, *operands, how=how, stage=stage)
    if how.insists:
        fault, way_out = _ELSEWHERE[is_for_tpu]
        raise ValueError(f"implementation='splash' is a kernel {fault}. {way_out}.")
    return mlir.lower_fun(functools.partial(_run_formula, how=how, stage=stage))(context, *operands)


def _lower_kernel(context: Any, *operands: Any, how: Splash, stage: str) -> Any:
    shapes = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in context.avals_in)
    program = _program(how, stage, shapes, INTERPRET)
    lower = mlir.lower_fun(jex_core.jaxpr_as_fun(program))
    return lower(context.replace(avals_in=program.in_avals), *operands)


def _is_whole(axis_context: Any) -> bool:
    """Returns whether the program that is lowered sees whole arrays: on one device, or within
    `shard_map`.
    """
    if hasattr(axis_context, "num_devices"):
        return axis_context.num_devices == 1
    mesh = getattr(axis_context, "mesh", None)
    return mesh is None or {*axis_context.manual_axes, *mesh.manual_axes} == set(mesh.axis_names)


@functools.cache
def _compiled(how: Splash, stage: str) -> Any:
    return jax.jit(functools.partial(_kernel_p.bind, how=how, stage=stage))


def _batch(operands: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    """Batches the kernel: the new batch axis comes before the others."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = _kernel_p.bind(*operands, **params)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    """Differentiates XLA's formula: for derivatives of the second order."""
    run = functools.partial(_run_formula, **params)
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return _kernel_p.bind(*primals, **params), jax.jvp(run, tuple(primals), tangents)[1]


_kernel_p.def_impl(lambda *operands, how, stage: _compiled(how, stage)(*operands))
ad.primitive_jvps[_kernel_p] = _jvp
batching.primitive_batchers[_kernel_p] = _batch
mlir.register_lowering(_kernel_p, functools.partial(_lower, is_for_tpu=False))
mlir.register_lowering(_kernel_p, functools.partial(_lower, is_for_tpu=True), platform="tpu")

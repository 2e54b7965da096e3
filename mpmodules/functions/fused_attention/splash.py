"""Splash attention as a function that JAX can differentiate in either mode, any number of times,
and batch.

JAX's kernel has a `custom_vjp`, which has no forward mode. Here the first derivative is a
primitive: forward mode evaluates XLA's formula, and transposition, which is reverse mode, calls the
kernel's backward pass. Derivatives of higher order are XLA's. As a primitive, the kernel is also
traced when it is lowered for a TPU, and not before.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from mpmodules.functions.attention import dot_product_attention
from mpmodules.functions.fused_attention import splash_kernel as kernels

Array = jax.Array
Three = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class Splash:
    """The static parameters of one attention.

    Attributes:
      mask: the pairs that are kept; None keeps all.
      is_causal: masks out the keys after each query.
      insists: lowers to the kernel or not at all, rather than to XLA's formula where the kernel
        can't be partitioned.
    """

    mask: kernels.StaticMask | None
    is_causal: bool
    insists: bool

    def formula(self, query: Array, key: Array, value: Array) -> Array:
        """Computes the same attention by XLA's operations."""
        mask: Any = (
            None
            if self.mask is None
            else self.mask.array.reshape((1,) * (query.ndim - 3) + self.mask.shape)
        )
        return dot_product_attention(
            query, key, value, mask=mask, is_causal=self.is_causal, reduction_dtype=jnp.float32
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def splash_attention(how: Splash, query: Array, key: Array, value: Array) -> Array:
    """Computes softmax(q k^T / sqrt(H)) v in one kernel.

    Args:
      how: the masks, and whether to insist on the kernel.
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H), K a divisor of N.

    Returns:
      (B..., T, N, H) in the queries' dtype.
    """
    (out,) = _kernel_p.bind(query, key, value, how=how, stage="forward")
    return out


@splash_attention.defjvp
def _attention_jvp(how: Splash, primals: Three, tangents: Three) -> tuple[Array, Array]:
    out, log_sum = _with_residuals(how, *primals)
    return out, _tangent_p.bind(*primals, out, log_sum, *tangents, how=how)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_residuals(how: Splash, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    out, log_sum = _kernel_p.bind(query, key, value, how=how, stage="forward_with_residuals")
    return out, log_sum


@_with_residuals.defjvp
def _with_residuals_jvp(how: Splash, primals: Three, tangents: Three) -> tuple[Any, Any]:
    out, log_sum = _with_residuals(how, *primals)
    tangent = _tangent_p.bind(*primals, out, log_sum, *tangents, how=how)
    return (out, log_sum), (
        tangent,
        jnp.zeros_like(log_sum),
    )  # backward's derivative goes by the operands alone


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(
    how: Splash,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    log_sum: Array,
    cotangent: Array,
) -> Three:
    return tuple(
        _kernel_p.bind(query, key, value, out, log_sum, cotangent, how=how, stage="backward")
    )


@_backward.defjvp
def _backward_jvp(
    how: Splash, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Three, Three]:
    def pullback(query: Array, key: Array, value: Array, cotangent: Array) -> Three:
        return jax.vjp(how.formula, query, key, value)[1](cotangent)

    _, derivative = jax.jvp(pullback, (*primals[:3], primals[5]), (*tangents[:3], tangents[5]))
    return _backward(how, *primals), derivative


# --------------------------------------------------------------------------------------------------
# The kernel as a primitive
# --------------------------------------------------------------------------------------------------

_kernel_p = jex_core.Primitive("splash_attention")
_kernel_p.multiple_results = True


def _log_sum(query: Any) -> Any:
    """Returns the aval of the logarithms of the softmax's denominators: (B..., N, T), float32."""
    *batch, queries, heads, _ = query.shape
    shape = (*batch, heads, queries)
    sharding = query.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return query.update(shape=shape, dtype=jnp.dtype(jnp.float32), sharding=sharding)


@_kernel_p.def_abstract_eval
def _kernel_avals(query: Any, key: Any, value: Any, *_: Any, how: Splash, stage: str) -> list[Any]:
    if stage == "backward":
        return [query, key, value]
    return [query] if stage == "forward" else [query, _log_sum(query)]


@functools.lru_cache(maxsize=256)
def _program(
    how: Splash, stage: str, operands: tuple[jax.ShapeDtypeStruct, ...], interpret: bool
) -> Any:
    """Traces the kernel to a jaxpr.

    It is traced in a thread of its own, where no context of the caller's holds: within `shard_map`,
    JAX's kernel does not say over which axes its outputs vary. Its `_kernel_avals` here do.
    """
    run = functools.partial(
        getattr(kernels, stage), mask=how.mask, is_causal=how.is_causal, interpret=interpret
    )
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(jax.make_jaxpr(run), *operands).result()


def _run_formula(*operands: Array, how: Splash, stage: str) -> list[Array]:
    """XLA's formula, for the outputs that its backward needs: it computes the softmax again."""
    if stage == "backward":
        return list(jax.vjp(how.formula, *operands[:3])[1](operands[5]))
    out = how.formula(*operands)
    if stage == "forward":
        return [out]
    *batch, queries, heads, _ = operands[0].shape
    return [out, jnp.zeros((*batch, heads, queries), jnp.float32)]


def _lower_for_tpu(context: Any, *operands: Any, how: Splash, stage: str) -> Any:
    """Lowers to the kernel, and to XLA's formula in a program that XLA partitions: Mosaic's kernels
    can't be.
    """
    if _is_whole(context.module_context.axis_context):
        return _lower_kernel(context, *operands, how=how, stage=stage)
    if how.insists:
        raise ValueError(
            "implementation='splash' is a kernel that XLA can't partition. Call it within "
            "jax.shard_map, or leave it out."
        )
    return _lower_formula(context, *operands, how=how, stage=stage)


def _lower_elsewhere(context: Any, *operands: Any, how: Splash, stage: str) -> Any:
    """Lowers to XLA's formula: a program for several platforms has the branch for TPUs lowered for
    all of them.
    """
    if kernels.INTERPRET:
        return _lower_kernel(context, *operands, how=how, stage=stage)
    if how.insists:
        raise ValueError(
            "implementation='splash' is a kernel for TPUs. Leave it out, or give "
            "implementation='xla'."
        )
    return _lower_formula(context, *operands, how=how, stage=stage)


def _lower_formula(context: Any, *operands: Any, how: Splash, stage: str) -> Any:
    return mlir.lower_fun(functools.partial(_run_formula, how=how, stage=stage))(context, *operands)


def _lower_kernel(context: Any, *operands: Any, how: Splash, stage: str) -> Any:
    shapes = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in context.avals_in)
    program = _program(how, stage, shapes, kernels.INTERPRET)
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


def _batch(primitive: Any, operands: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    """Batches a primitive: the new batch axis comes before the others."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results) if primitive.multiple_results else 0


_kernel_p.def_impl(lambda *operands, how, stage: _compiled(how, stage)(*operands))
batching.primitive_batchers[_kernel_p] = functools.partial(_batch, _kernel_p)
mlir.register_lowering(_kernel_p, _lower_elsewhere)
mlir.register_lowering(_kernel_p, _lower_for_tpu, platform="tpu")


# --------------------------------------------------------------------------------------------------
# Its derivative, linear in the tangents
# --------------------------------------------------------------------------------------------------

_tangent_p = jex_core.Primitive("splash_attention_tangent")
_RESIDUALS = 5  # queries, keys, values, what was returned, the softmax's denominators


def _run_tangent(*operands: Array, how: Splash) -> Array:
    return jax.jvp(how.formula, operands[:3], operands[_RESIDUALS:])[1]


def _tangent_jvp(primals: Any, tangents: Any, *, how: Splash) -> tuple[Array, Array]:
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    run = functools.partial(_run_tangent, how=how)
    return jax.jvp(run, tuple(primals), tuple(tangents))


def _tangent_transpose(cotangent: Any, *operands: Any, how: Splash) -> list[Any]:
    return [None] * _RESIDUALS + list(_backward(how, *operands[:_RESIDUALS], cotangent))


_tangent_p.def_abstract_eval(lambda *avals, how: avals[0])
_tangent_p.def_impl(
    lambda *operands, how: jax.jit(functools.partial(_run_tangent, how=how))(*operands)
)
ad.primitive_jvps[_tangent_p] = _tangent_jvp
ad.primitive_transposes[_tangent_p] = _tangent_transpose
batching.primitive_batchers[_tangent_p] = functools.partial(_batch, _tangent_p)
mlir.register_lowering(_tangent_p, mlir.lower_fun(_run_tangent, multiple_results=False))

"""Contents of memory: rematerialized float32 values, and 16-bit arrays as memory holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad, batching, mlir

from policy.programs.dtypes import HALVES, dtype_name
from policy.programs.primitives import SAVED

# --------------------------------------------------------------------------------------------------
# Rematerialization: the residuals are the inputs and the results of reductions and collectives
# --------------------------------------------------------------------------------------------------


def keeping_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoints `function`, saving only its inputs and results of reductions and collectives.

    Everything else is recomputed elementwise from those, so a function that upcasts its inputs to
    float32 leaves no float32 copy of them in memory. A function that reduces 16-bit inputs reads
    them by `as_stored`, so that backward has the numbers that were reduced. Without differentiation
    the program is that of `function`.

    Args:
      function: arrays in, a tree of arrays out; may close over arrays.
    """
    return jax.checkpoint(function, prevent_cse=False, policy=_is_kept)


@functools.lru_cache(maxsize=1024)
def keeping_inputs_once(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """Returns ``keeping_inputs(function(*static, ...))``, traced once as by `cached_inline_jit`."""
    return jax.jit(keeping_inputs(_given(function, static)), inline=True)


@functools.lru_cache(maxsize=1024)
def cached_inline_jit(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """Returns ``function(*static, ...)`` as a cached inline `jax.jit`, which is traced once.

    JAX also differentiates it once. Any number of layers may call it with arguments of the same
    shapes. Tracing a normalization, a softmax or a custom derivative takes most of its time in the
    transforms. The program is the same as without `jit`, except that newer JAX versions keep a call
    where it is differentiated.

    Args:
      function: a module-level function, not a closure: the cache would keep closed-over arrays
        alive and could return another closure's.
      *static: its leading arguments.
    """
    return jax.jit(_given(function, static), inline=True)


def _given(function: Callable[..., Any], static: tuple[Hashable, ...]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return function(*static, *arguments)

    run.__name__ = run.__qualname__ = function.__name__
    return run


def is_hashable(value: Any) -> bool:
    """Returns whether a value can be a static argument of `keeping_inputs_once`."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in SAVED


# --------------------------------------------------------------------------------------------------
# 16-bit arrays as memory holds them
#
# XLA drops a cast to 16 bits that is followed by a cast to float32, in each program for itself. So
# a function may read an unrounded matmul, and its derivative, in another program or in a loop's
# backward pass, the rounded one from memory: then no element equals the saved maximum, and
# exp(x - saved logsumexp) is no probability.
# --------------------------------------------------------------------------------------------------


def as_stored(x: Any) -> Any:
    """Returns `x` unchanged; in every program a bfloat16 or float16 array has its rounded numbers.

    The derivative is that of the identity. All else is returned as it is.
    """
    is_rounded = dtype_name(getattr(x, "dtype", None)) in HALVES
    return _as_stored_p.bind(x) if is_rounded else x


def _rounded(x: Array) -> Array:
    # With float32's exponents: with those of float16, its subnormal numbers would become 0.
    rounded = lax.reduce_precision(x.astype(jnp.float32), 8, int(jnp.finfo(x.dtype).nmant))
    return rounded.astype(x.dtype)


def materialized(x: Array) -> Array:
    """Returns `x` unchanged; programs for GPUs keep it in memory in its own dtype.

    On a GPU the operands of a matmul are in memory. A cotangent that a matmul reads in 16 bits and
    a bias gradient sums in float32 would be written twice, once in each dtype. On a TPU both users
    are fused with the producer of the cotangent.

    It is linear, and its cotangent is materialized too.
    """
    return _materialize_p.bind(x)


def _identity(name: str, transposed: Callable[[Any], Any]) -> jex_core.Primitive:
    """Returns a primitive that returns its operand; `transposed` maps its cotangent."""
    primitive = jex_core.Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    ad.deflinear2(primitive, lambda ct, _: [ct if isinstance(ct, ad.Zero) else transposed(ct)])
    batching.defvectorized(primitive)
    return primitive


_as_stored_p = _identity("as_stored", lambda cotangent: cotangent)
mlir.register_lowering(_as_stored_p, mlir.lower_fun(_rounded, multiple_results=False))

_materialize_p = _identity("materialize", materialized)
mlir.register_lowering(_materialize_p, lambda context, x: [x])
_barrier = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_materialize_p, _barrier, platform=_platform)

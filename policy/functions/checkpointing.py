"""Contents of memory: float32 values that are rematerialised, and half-precision arrays on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.extend.core as jex_core
from jax import Array, lax
from jax.interpreters import ad, batching, mlir

from policy.programs.primitives import SAVED

# --------------------------------------------------------------------------------------------------
# Rematerialisation: the residuals are the inputs and the results of reductions and collectives
# --------------------------------------------------------------------------------------------------


def keeping_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoints `function`, saving only its inputs and results of reductions and collectives.

    Everything else is recomputed elementwise from those, so a function that widens its inputs to
    float32 leaves no float32 copy of them in memory. Without differentiation the program is that of
    `function`.

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
    shapes. Tracing a normalisation, a softmax or a custom derivative takes most of its time in the
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
# Half-precision arrays that XLA for GPUs writes to memory in half precision
#
# XLA drops a cast to half precision that is followed by a cast to float32. On a GPU the operands of
# a matmul are in memory. A cotangent that a matmul reads in half precision and a bias gradient sums
# in float32 is then written twice, once in each dtype. On a TPU both readers are fused with the
# producer of the cotangent, and no barrier is needed.
# --------------------------------------------------------------------------------------------------


_materialize_p = jex_core.Primitive("materialize")


def materialized(x: Array) -> Array:
    """Returns `x` unchanged; programs for GPUs keep it in memory in its own dtype.

    It is linear, and its cotangent is materialized too.
    """
    return _materialize_p.bind(x)


def _transpose(cotangent: Any, x: Any) -> list[Any]:
    return [cotangent if isinstance(cotangent, ad.Zero) else materialized(cotangent)]


_materialize_p.def_impl(lambda x: x)
_materialize_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_materialize_p, _transpose)
batching.defvectorized(_materialize_p)
mlir.register_lowering(_materialize_p, lambda context, x: [x])
_barrier = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_materialize_p, _barrier, platform=_platform)

"""Traces a function as if every half dtype were float32, with unrounded constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util

from policy.core.scope import use_policy
from policy.programs.dtypes import F32, is_half
from policy.programs.primitives import HOST, READS_BITS
from policy.programs.rewriting.upcast import widen

source_info_util.register_exclusion(__file__)  # equations get the caller's source line


def _by_outer(name: str) -> Callable[..., Any]:
    """Returns a method of a trace that calls that of the outer trace."""

    def method(self: _Float32Trace, *args: Any, **params: Any) -> Any:
        with jex_core.set_current_trace(self.outer):
            return getattr(self.outer, name)(*args, **params)

    return method


class _Float32Trace(jax.core.Trace):
    """Hands operations to the outer trace with float32 in place of the half dtypes they name."""

    def __init__(self, outer: Any):
        super().__init__()
        self.outer = outer

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        with jex_core.set_current_trace(self.outer):
            if primitive.name not in HOST and primitive.name not in READS_BITS:
                tracers = [_widened(tracer) for tracer in tracers]
                params = {name: _wide(value) for name, value in params.items()}
            return primitive.bind(*tracers, **params)

    stage_value = _by_outer("stage_value")
    process_call = _by_outer("process_call")
    process_custom_jvp_call = _by_outer("process_custom_jvp_call")
    process_custom_vjp_call = _by_outer("process_custom_vjp_call")
    process_shard_map = _by_outer("process_shard_map")


def _widened(operand: Any) -> Any:
    if isinstance(operand, (np.ndarray, np.generic)):
        return np.asarray(operand, F32) if is_half(operand.dtype) else operand
    return widen(operand)


def _wide(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    return F32 if is_dtype and is_half(value) else value


def in_float32(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced in float32 wherever its code names a half dtype.

    Casts to a half dtype give float32, and half constants are widened where they are read, so code
    that inspects `dtype` sees float32; no policy is in force. A function that JAX traces by itself
    (jit, the body of a scan) is traced for float32 operands, but has the half dtypes that its own
    code names.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with (
            jex_core.take_current_trace() as outer,
            jex_core.set_current_trace(_Float32Trace(outer)),
            use_policy(None),
            jax.numpy_dtype_promotion("standard"),
        ):
            return fn(*args, **kwargs)

    return run


def wide_arguments(arrays: Sequence[Any]) -> list[Any]:
    """Returns arguments to trace with: half-precision arrays become float32 shapes."""
    return [_shape(a) if is_half(getattr(a, "dtype", F32)) else a for a in arrays]


def _shape(array: Any) -> Any:
    sharding = getattr(jax.typeof(array), "sharding", None)
    return jax.ShapeDtypeStruct(array.shape, F32, sharding=sharding)

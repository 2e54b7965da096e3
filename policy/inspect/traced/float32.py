"""Traces a function as if every half dtype were float32, with unrounded constants."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util
from jax.extend.core.primitives import convert_element_type_p

from policy.core.scope import Scope, current_scope, enter
from policy.programs.dtypes import F32
from policy.programs.primitives import HOST, READS_BITS
from policy.programs.upcast import is_half

source_info_util.register_exclusion(__file__)  # equations get the caller's source line
_lock = threading.Lock()
_traces = 0  # how many are under way, in all threads

_bind: Callable[..., Any] = jex_core.Primitive.bind


def _bind_wide(primitive: Any, *args: Any, **params: Any) -> Any:
    """`Primitive.bind` on widened operands, to a widened result."""
    if (
        current_scope().in_float32
        and primitive.name not in HOST
        and primitive.name not in READS_BITS
    ):
        args = tuple(map(_widened, args))
        params = {name: _wide(value) for name, value in params.items()}
    return _bind(primitive, *args, **params)


def _widened(operand: Any) -> Any:
    dtype = getattr(operand, "dtype", None)
    if dtype is None or not is_half(dtype):
        return operand
    if isinstance(operand, (np.ndarray, np.generic)):
        return np.asarray(operand, F32)
    return _bind(convert_element_type_p, operand, new_dtype=F32, weak_type=False, sharding=None)


def _wide(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    return F32 if is_dtype and is_half(value) else value


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Traces in float32 wherever this thread's code names a half dtype, for a block.

    Casts to a half dtype give float32, and half constants are widened where they are read, so code
    that inspects `dtype` sees float32; no policy is in force. JAX has no tracing rule that reaches
    into jitted or scanned functions, so `Primitive.bind` is replaced for the duration of the block.
    The replacement follows the scope, which is thread-local and part of JAX's cache keys, so that
    other threads and later traces are unaffected.
    """
    global _traces
    with _lock:
        _traces += 1
        setattr(jex_core.Primitive, "bind", _bind_wide)  # noqa: B010
    try:
        with enter(Scope(in_float32=True)), jax.numpy_dtype_promotion("standard"):
            yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                setattr(jex_core.Primitive, "bind", _bind)  # noqa: B010


def wide_arguments(arrays: Sequence[Any]) -> list[Any]:
    """Returns arguments to trace with: half-precision arrays become float32 shapes."""
    return [_shape(a) if is_half(getattr(a, "dtype", F32)) else a for a in arrays]


def _shape(array: Any) -> Any:
    sharding = getattr(jax.typeof(array), "sharding", None)
    return jax.ShapeDtypeStruct(array.shape, F32, sharding=sharding)

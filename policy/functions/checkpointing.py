"""Rematerialisation of float32 computations over half-precision inputs.

The residuals are the inputs and the results of reductions and collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from policy.programs.primitives import SAVED


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

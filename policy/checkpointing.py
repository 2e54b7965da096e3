"""What backward keeps of a computation in float32 over half-precision inputs: the inputs, and the small statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from policy._jaxpr.primitives import SAVED


def keeping_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of which backward keeps the inputs as they came and the results of reductions and collectives.

    Everything else is computed again, elementwise from those. So a function that widens its inputs to float32 leaves no
    float32 copy of them in memory; without differentiation the program is `function`'s own.

    Args:
      function: arrays in, a tree of arrays out; may close over arrays.
    """
    return jax.checkpoint(function, prevent_cse=False, policy=_is_kept)


@functools.lru_cache(maxsize=1024)
def keeping_inputs_once(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """`keeping_inputs` of ``function(*static, ...)``, traced as `traced_once` says."""
    return jax.jit(keeping_inputs(_given(function, static)), inline=True)


@functools.lru_cache(maxsize=1024)
def traced_once(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """``function(*static, ...)``, the same object for the same arguments: JAX traces and differentiates it once.

    However many layers call it with arguments of the same shapes. Most of the time that a normalisation, a softmax or a
    custom derivative takes to trace is that of its transforms. The program is as without `jit`, but that on newer JAX
    what is differentiated stays a call.

    Args:
      function: of a module, not a closure: what it closes over would be kept alive, and an array be another's.
      *static: its leading arguments.
    """
    return jax.jit(_given(function, static), inline=True)


def _given(function: Callable[..., Any], static: tuple[Hashable, ...]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return function(*static, *arguments)

    run.__name__ = run.__qualname__ = function.__name__
    return run


def is_hashable(value: Any) -> bool:
    """Whether `keeping_inputs_once` takes a value."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in SAVED

"""The nesting of transforms: `mixed_precision` goes around all of optax's wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def require_outermost(make_state: Callable[..., Any]) -> None:
    """Refuses an `init` that is called by one of optax's transforms.

    A wrapped transform can't see its wrapper, but each wrapper makes its state by calling the
    wrapped `init`. So one look at the callers, once for each state, covers every later use of it.

    Args:
      make_state: the function by which a `mixed_precision` calls its inner transform's `init`, and
        refuses another `mixed_precision` in there itself.

    Raises:
      TypeError: by the wrapper's name.
    """
    frame, name = inspect.currentframe(), None
    while frame is not None:
        if frame.f_code is make_state.__code__:
            return
        if _is_transform(frame.f_globals.get("__name__", "")):
            # the last one found is the outermost: partition calls masked
            name = frame.f_code.co_qualname.partition(".")[0]
        frame = frame.f_back
    if name is not None:
        raise TypeError(
            f"mixed_precision should be outermost, but is inside optax's {name}, which would see "
            "the gradients of skipped steps and change updates after they were rounded. "
            f"Put it outermost: mixed_precision(optax.{name}(...), policy)."
        )


def _is_transform(module: str) -> bool:
    """Returns whether a module of optax defines transforms, and not only functions on trees."""
    return module.startswith("optax.") and not module.startswith("optax.tree_utils")

"""Arguments of JAX functions under the names that they had when older packages were written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# Function, and the old names of its arguments with the new ones.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "clip": {"a_min": "min", "a_max": "max"},
    "reshape": {"newshape": "shape"},
}


def install() -> None:
    """Lets `jax.numpy`'s functions be called with arguments by their old names."""
    for name, renamed in RENAMED.items():
        function = getattr(jnp, name)
        if not hasattr(function, "_renamed"):
            setattr(jnp, name, _renaming(function, renamed))


def _renaming(function: Any, renamed: Mapping[str, str]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{renamed.get(name, name): value for name, value in kwargs.items()})

    call._renamed = renamed  # type: ignore[attr-defined]
    return call

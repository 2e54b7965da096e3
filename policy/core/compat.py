"""Differences between the supported JAX versions."""

from __future__ import annotations

from typing import Any


def set_global(context: Any, value: Any) -> None:
    """Sets the value of a `jax.make_user_context` for every thread.

    The method is public since jax 0.10.1; before that it belongs to the wrapped object.
    """
    holder = context if hasattr(context, "set_global") else context._obj
    holder.set_global(value)

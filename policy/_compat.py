"""What differs between the JAX versions that are supported."""

from __future__ import annotations

from typing import Any


def set_global(context: Any, value: Any) -> None:
    """Sets a `jax.make_user_context`'s value for every thread: public since jax 0.10.1, until then its holder's."""
    holder = context if hasattr(context, "set_global") else context._obj
    holder.set_global(value)

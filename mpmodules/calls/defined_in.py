"""The Python module of a class or a function. One made by `exec`, or by hand, may name none."""

from __future__ import annotations

from typing import Any


def module_of(definition: Any) -> str:
    """Returns the name of the Python module that a class or function was defined in, or "" where it
    does not say.
    """
    return getattr(definition, "__module__", None) or ""


def package_of(definition: Any) -> str:
    """Returns the top-level package that a class or function was defined in, or "" where it does
    not say.
    """
    return module_of(definition).partition(".")[0]


def is_flax(definition: Any) -> bool:
    """Returns whether a class or function is Flax's own."""
    return package_of(definition) == "flax"


def is_upstream(definition: Any) -> bool:
    """Returns whether a class or function is Flax's own, or ours in its place, rather than a
    user's.
    """
    return package_of(definition) in ("flax", "mpmodules")

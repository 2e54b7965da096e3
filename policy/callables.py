"""Refuses values, classes and unbound modules that are handed over as functions to trace."""

from __future__ import annotations

from typing import Any


def require_function(fn: Any, what: str, *, takes: str = "a function") -> None:
    """Refuses what is no function of arrays: values, classes, and linen modules without their variables.

    Args:
      fn: a function, or a module that can be called.
      what: what takes it, for messages.
      takes: what it takes.

    Raises:
      TypeError: it is none.
    """
    if isinstance(fn, type):
        raise TypeError(f"{what} takes {takes}, but got the class {fn.__name__}: pass an instance, or a method of one.")
    if not callable(fn):
        raise TypeError(f"{what} takes {takes}, but got {shown(fn)} of type {type(fn).__name__}.")
    if _is_unbound_linen_module(fn):
        name = type(fn).__name__
        raise TypeError(
            f"{what} takes {takes}, but got the linen module {name}, which has no variables of its own: pass its "
            "apply, model.apply, and the variables as the first argument."
        )


def shown(value: Any) -> str:
    """Returns a value's text for messages, a long one shortened."""
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"{text.splitlines()[0][:80]} ..."


def _is_unbound_linen_module(fn: Any) -> bool:
    of_linen = any((cls.__module__ or "").startswith("flax.linen.") for cls in type(fn).__mro__)
    return of_linen and hasattr(fn, "apply") and getattr(fn, "scope", None) is None

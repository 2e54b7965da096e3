"""Input checks for arguments that should be functions."""

from __future__ import annotations

from typing import Any


def require_function(fn: Any, what: str, *, takes: str = "a function") -> None:
    """Raises unless `fn` is a function of arrays.

    Refuses values, classes and unbound linen modules.

    Args:
      fn: a function, or a callable module.
      what: the name of the caller, for the message.
      takes: the description of the expected argument, for the message.

    Raises:
      TypeError: `fn` is not such a function.
    """
    if isinstance(fn, type):
        raise TypeError(
            f"{what} takes {takes}, but got the class {fn.__name__}: pass an instance, or a method "
            "of one."
        )
    if not callable(fn):
        raise TypeError(f"{what} takes {takes}, but got {shown(fn)} of type {type(fn).__name__}.")
    if _is_unbound_linen_module(fn):
        name = type(fn).__name__
        raise TypeError(
            f"{what} takes {takes}, but got the linen module {name}, which holds no variables: "
            "pass model.apply, and the variables as its first argument."
        )


def shown(value: Any) -> str:
    """Returns the text of a value for messages; a long text is shortened."""
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"{text.splitlines()[0][:80]} ..."


def _is_unbound_linen_module(fn: Any) -> bool:
    of_linen = any((cls.__module__ or "").startswith("flax.linen.") for cls in type(fn).__mro__)
    return of_linen and hasattr(fn, "apply") and getattr(fn, "scope", None) is None

"""The parameters of modules that a user writes: which are left to their own dtypes."""

from __future__ import annotations

from typing import Any


def require_names(cls: type, attribute: str) -> None:
    """Refuses a class attribute that is no collection of names.

    Raises:
      TypeError: the class itself sets the attribute to something else.
    """
    names = vars(cls).get(attribute, ())
    if isinstance(names, str) or not isinstance(names, tuple | list | set | frozenset) or not _all_names(names):
        raise TypeError(f'{cls.__name__}.{attribute} should be a tuple of names, as ("scale",), but got {names!r}.')


def _all_names(names: Any) -> bool:
    return all(isinstance(name, str) for name in names)

"""Warnings that part of a program doesn't obey the policy in force, each given once."""

from __future__ import annotations

import warnings
from typing import Any


class DtypePolicyWarning(UserWarning):
    """Warns that part of a program doesn't obey the policy in force.

    >>> import warnings
    >>> import policy
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     y = policy.autocast(lambda x: 2 * x)(1.0)  # without any policy
    >>> caught[0].category is policy.DtypePolicyWarning
    True
    """


_warned: set[str] = set()
_filters_then: Any = None


def warn_once(message: str) -> None:
    """Emits a `DtypePolicyWarning`, once per message while the warning filters stay the same."""
    global _filters_then
    if warnings.filters is not _filters_then:  # a new catch_warnings block listens afresh
        _warned.clear()
        _filters_then = warnings.filters
    if message not in _warned:
        warnings.warn(message, DtypePolicyWarning, stacklevel=2)
        _warned.add(message)

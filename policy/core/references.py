"""Objects that casts pass on by identity.

Libraries with stateful modules register predicates for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Each returns whether an object is, or is tied to, state that a copy would lose.
REFERENCES: list[Callable[[Any], bool]] = []


def is_reference(x: Any) -> bool:
    """Returns whether `x` is state, or is tied to state, that a copy would lose."""
    return any(knows(x) for knows in REFERENCES)

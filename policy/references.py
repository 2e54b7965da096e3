"""Objects that casts pass on by identity: the libraries whose modules hold state say which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Each returns whether an object is, or is tied to, state that a copy would lose.
REFERENCES: list[Callable[[Any], bool]] = []


def is_reference(x: Any) -> bool:
    """Returns whether `x` is, or is tied to, state that a copy would lose."""
    return any(knows(x) for knows in REFERENCES)

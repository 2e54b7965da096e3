"""Programs by key, of which the most recent are kept."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(dict[Hashable, V], Generic[V]):
    """At most `most` values, those that were kept last."""

    def __init__(self, most: int):
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def keep(self, key: Hashable, value: V) -> V:
        """Keeps a value, and returns it."""
        with self._lock:
            self[key] = value
            if len(self) > self._most:
                del self[next(iter(self))]
        return value

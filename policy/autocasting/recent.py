"""Programs by key, of which the most recent are kept."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(collections.OrderedDict[Hashable, V], Generic[V]):
    """At most `most` values, those that were used last."""

    def __init__(self, most: int):
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def find(self, key: Hashable) -> V | None:
        """Returns the value of a key, or None.

        Raises:
          TypeError: the key has no hash.
        """
        with self._lock:
            if key in self:
                self.move_to_end(key)
            return self.get(key)

    def keep(self, key: Hashable, value: V) -> V:
        """Keeps a value, and returns it."""
        with self._lock:
            self[key] = value
            if len(self) > self._most:
                self.popitem(last=False)
        return value

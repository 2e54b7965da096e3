"""The time of a program whose exchanges run beside its kernels, as its schedule has them.

A program's text lists instructions in the order in which they run. An asynchronous exchange has a
start and an end, and the kernels between them run at the same time. The links between devices carry
one exchange after another, in the order of their starts; at an end the program waits for what is
left of that exchange and of those before it.
"""

from __future__ import annotations


class Timeline:
    """The run of one computation.

    >>> from policy.inspect.hlo.timeline import Timeline
    >>> timeline = Timeline()
    >>> timeline.start("gather", 5.0)
    >>> timeline.run(3.0)
    >>> timeline.wait("gather")
    >>> timeline.elapsed
    5.0

    Attributes:
      elapsed: the time until now.
      busy: the time that the links need for the exchanges until now.
    """

    def __init__(self) -> None:
        self.elapsed = self.busy = 0.0
        self._left: dict[str, float] = {}  # of exchanges that have started, by key

    def run(self, time: float, busy: float = 0.0) -> None:
        """Runs kernels, or a computation whose own exchanges keep the links busy for a while."""
        self.elapsed += time
        self.busy += busy
        free = max(0.0, time - busy)
        for key, left in self._left.items():
            moved = min(left, free)
            self._left[key] = left - moved
            free -= moved

    def start(self, key: str, time: float) -> None:
        """Starts an exchange that takes `time`."""
        self._left[key] = self._left.get(key, 0.0) + time
        self.busy += time

    def wait(self, key: str) -> None:
        """Waits for the end of an exchange; of one that did not start here it does nothing."""
        if key not in self._left:
            return
        for before in list(self._left):
            self.elapsed += self._left.pop(before)
            if before == key:
                return

    def exchange(self, time: float) -> None:
        """Runs an exchange that nothing runs beside."""
        self.elapsed += time
        self.busy += time

    def wait_for_all(self) -> None:
        """Waits for all exchanges that have started."""
        for key in list(self._left):
            self.wait(key)

"""Progress of a command on the standard error: a line for each row, with its seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO


class RowProgress:
    """Writes a line for each row that is compiled; on a terminal it counts the seconds meanwhile.

    It is the `progress` of `policy.estimate`, and is closed as a context manager.

    >>> import sys
    >>> with RowProgress("v5e:4x4", file=sys.stdout) as progress:
    ...     progress("float32", 0, 2)
    ...     progress("bfloat16", 1, 2)
    v5e:4x4 1/2 float32: ... s
    v5e:4x4 2/2 bfloat16: ... s

    Args:
      prefix: the beginning of each line.
      is_quiet: whether nothing is written.
      file: the standard error if None.
    """

    def __init__(self, prefix: str, *, is_quiet: bool = False, file: TextIO | None = None):
        self._prefix = prefix
        self._is_quiet = is_quiet
        self._file = sys.stderr if file is None else file
        self._is_terminal = not is_quiet and self._file.isatty()
        self._row = ""
        self._start = 0.0
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._counting: threading.Thread | None = None

    def __enter__(self) -> RowProgress:
        if self._is_terminal:
            self._counting = threading.Thread(target=self._count, daemon=True)
            self._counting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._counting is not None:
            self._counting.join()
        with self._writing:
            self._finish("" if error is None else " (failed)")

    def __call__(self, name: str, done: int, total: int) -> None:
        with self._writing:
            self._finish()
            self._row = f"{self._prefix} {done + 1}/{total} {name}"
            self._start = time.monotonic()
            self._rewrite()

    def _count(self) -> None:
        while not self._over.wait(1.0):
            with self._writing:
                self._rewrite()

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _rewrite(self) -> None:
        if self._row and self._is_terminal:
            self._write(f"\r\x1b[K{self._row}: {self._seconds():.0f} s")

    def _finish(self, mark: str = "") -> None:
        """Ends the line of the row that was compiled, if there is one."""
        if self._row:
            start = "\r\x1b[K" if self._is_terminal else ""
            self._write(f"{start}{self._row}: {self._seconds():.1f} s{mark}\n")
        self._row = ""

    def _write(self, text: str) -> None:
        if not self._is_quiet:
            self._file.write(text)
            self._file.flush()

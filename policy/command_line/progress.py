"""Progress of a command on the standard error: a line for each row, with its seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO


@contextlib.contextmanager
def row_progress(prefix: str, file: TextIO | None = None) -> Iterator[Callable[..., None]]:
    """Writes a line for each row that is compiled: its name at once, its seconds when it is done.

    It yields the `progress` of `policy.estimate`.

    >>> import sys
    >>> with row_progress("v5e:4x4", file=sys.stdout) as progress:
    ...     progress("float32", 0, 2)
    ...     progress("bfloat16", 1, 2)
    v5e:4x4 1/2 float32: ... s
    v5e:4x4 2/2 bfloat16: ... s

    Args:
      prefix: the beginning of each line.
      file: the standard error if None.
    """
    started: list[float] = []

    def write(text: str) -> None:
        print(text, end="", file=sys.stderr if file is None else file, flush=True)

    def finish(mark: str = "") -> None:
        if started:
            write(f"{time.monotonic() - started.pop():.1f} s{mark}\n")

    def progress(name: str, done: int, total: int) -> None:
        finish()
        write(f"{prefix} {done + 1}/{total} {name}: ")
        started.append(time.monotonic())

    try:
        yield progress
    except BaseException:
        finish(" (failed)")
        raise
    finish()

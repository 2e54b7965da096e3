"""The command ``watch``: a run's log, printed once or while it grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from policy.command_line.arguments import prefixed_errors
from policy.inspect.render.text import shows_colour
from policy.inspect.runs.advice import Advice, advise
from policy.inspect.runs.history import RunRecord
from policy.inspect.runs.page import run_page
from policy.inspect.runs.run_log import read_records
from policy.inspect.runs.text import run_text

_PAUSE = 2.0  # seconds between two looks at the file


def show_run(
    name: str, html: str | None, *, follow: bool, pause: Callable[[], None] | None = None
) -> tuple[Advice, ...]:
    """Prints a run's log, writes its page, and does so again whenever the file has grown.

    Args:
      name: of the file.
      html: the file of the page, "-" for the standard output in place of the text, or None.
      follow: go on until an interrupt.
      pause: is called between two looks; it sleeps by default.

    Returns:
      The advice of the last look.

    Raises:
      CommandError: the file can't be read, or is not a run's log; the page can't be written.
    """
    size, advice = -1, ()
    try:
        while True:
            with prefixed_errors("watch"):
                now = Path(name).stat().st_size if Path(name).exists() else 0
                records = read_records(name) if now != size else []
            if now != size:
                size, advice = now, advise(records)
                _show(records, name, html, sys.stdout, follow)
            if not follow:
                return advice
            (pause or _sleep)()
    except KeyboardInterrupt:
        return advice


def _show(
    records: list[RunRecord], name: str, html: str | None, file: TextIO, clears: bool
) -> None:
    if html != "-":
        colour = shows_colour(file)
        cleared = "\x1b[2J\x1b[H" if clears and colour else ""
        text = run_text(records, Path(name).name, colour=colour)
        print(f"{cleared}{text}", file=file, flush=True)
    if html is not None:
        page = run_page(records, Path(name).name)
        if html == "-":
            print(page, file=file)
        else:
            with prefixed_errors(f"{html!r} can't be written"):
                Path(html).write_text(page, encoding="utf-8")


def _sleep() -> None:
    time.sleep(_PAUSE)

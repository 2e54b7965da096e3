"""The command ``watch``: a run's log, printed once or while it grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from policy.command_line.arguments import prefixed_errors
from policy.inspect.render.text import shows_color
from policy.inspect.runs.advice import Advice, advise
from policy.inspect.runs.run_log import read_records
from policy.inspect.runs.text import run_text

_PAUSE = 2.0  # seconds between two looks at the file


def show_run(
    name: str, *, follow: bool, pause: Callable[[], None] = lambda: time.sleep(_PAUSE)
) -> tuple[Advice, ...]:
    """Prints a run's log, and does so again whenever the file has grown.

    Args:
      name: of the file.
      follow: go on until an interrupt.
      pause: is called between two looks.

    Returns:
      The advice of the last look.

    Raises:
      CommandError: the file can't be read, or is not a run's log.
    """
    size, advice, color = -1, (), shows_color(sys.stdout)
    cleared = "\x1b[2J\x1b[H" if follow and color else ""
    try:
        while True:
            now = Path(name).stat().st_size if Path(name).exists() else 0
            if now != size:
                with prefixed_errors("watch"):
                    records = read_records(name)
                size, advice = now, advise(records)
                text = run_text(records, Path(name).name, color=color)
                print(f"{cleared}{text}", flush=True)
            if not follow:
                return advice
            pause()
    except KeyboardInterrupt:
        return advice

"""Plots of reports, which matplotlib draws."""

from __future__ import annotations

from typing import Any


def new_figure(of: str, advice: str = "", **options: Any) -> Any:
    """Returns an empty matplotlib Figure, which belongs to no window.

    Args:
      of: the class whose `plot` draws it.
      advice: follows the message of the error.
      **options: of the Figure.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: it would open a window's backend
    except ImportError:
        raise ImportError(
            f"{of}.plot draws with matplotlib, which is not installed: pip install matplotlib"
            f"{advice}"
        ) from None
    return Figure(**options)

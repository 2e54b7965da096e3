"""A plot of the front of error against cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policy.inspect.suggest.front import FrontPoint, unbeaten


def plotted(
    points: Sequence[FrontPoint],
    chosen: FrontPoint | None,
    budget: float,
    title: str,
    path: str | Path | None,
) -> Any:
    """Draws the points that fit as a matplotlib Figure, and writes it to a file.

    Args:
      points: the points.
      chosen: the one to mark; None for none.
      budget: the error allowed; infinite for none.
      title: of the figure.
      path: of the file, or None.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: it would open a window's backend
    except ImportError:
        raise ImportError(
            "Suggestion.plot draws with matplotlib, which is not installed: pip install matplotlib."
        ) from None
    figure = Figure(figsize=(6, 4), layout="tight")
    axes = figure.add_subplot()
    front, fitting = unbeaten(points), [point for point in points if point.fits]
    errors = [point.error for point in fitting if 0 < point.error < math.inf] or [1.0]
    low, high = min(errors) / 4, max(errors) * 4
    longest = max((point.seconds or 0.0 for point in fitting), default=0.0)
    unit, scale = ("milliseconds", 1e3) if longest > 1e-3 else ("microseconds", 1e6)

    def place(some: Sequence[FrontPoint]) -> tuple[list[float], list[float]]:
        heights = [min(max(point.error, low), high) for point in some]
        return [scale * (point.seconds or 0.0) for point in some], heights

    axes.plot(*place(front), "o-", label="front", drawstyle="steps-post")
    if beaten := [point for point in fitting if point not in front]:
        axes.plot(*place(beaten), "x", color="gray", label="beaten")
    if chosen is not None:
        axes.plot(*place([chosen]), "o", ms=12, mfc="none", color="C3", label="chosen")
    for i, (x, y) in enumerate(zip(*place(front), strict=True)):
        said = f"{i}: {len(front[i].paths)} in float32"
        axes.annotate(said, (x, y), (6, 6), textcoords="offset points", fontsize=8)
    if math.isfinite(budget):
        axes.axhline(budget, color="C3", lw=0.8, ls=":", label="budget")
    axes.set_yscale("log")
    axes.set_ylim(low / 2, high * 2)
    axes.set_xlabel(f"{unit} of a step")
    axes.set_ylabel("error relative to float32\n(at the edges: none, or overflow)", fontsize=9)
    axes.margins(x=0.2)
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure

"""A comparison as a picture: the error of each path, on a logarithmic scale."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from policy.inspect.compare.report import Row, Rows
from policy.inspect.render.html import figure

_SERIES = (("activations", "#3465a4"), ("gradients", "#c4742a"))
_JUMP = "#a40000"
_BEYOND = 48  # pixels between the last decade and infinity
_LEFT, _RIGHT, _TOP, _LINE = 280, 40, 54, 18  # of the drawing, in pixels


def svg(comparison: Rows) -> str:
    """Draws a line for each path, with dots for its activation and gradient.

    Overflows are red, at infinity.
    """
    rows = (*comparison.activations, *comparison.gradients)
    paths = list(dict.fromkeys(row.path for row in rows))
    low, high = _decades(rows)
    width, height = 900, _TOP + _LINE * max(len(paths), 1) + 24
    finite = width - _LEFT - _RIGHT - _BEYOND
    x = lambda error: (  # noqa: E731
        _LEFT + (finite + _BEYOND if math.isinf(error) else finite * _along(error, low, high))
    )
    parts = [_frame(comparison, width, height)]
    for decade in range(low, high + 1):
        place = x(10.0**decade)
        parts.append(_grid(place, height, f"1e{decade}"))
    if any(math.isinf(row.error) for row in rows):
        parts.append(_grid(x(math.inf), height, "∞"))
    for i, path in enumerate(paths):
        parts.append(_label(path, _TOP + _LINE * i, path == comparison.first_jump))
    for name, colour in _SERIES:
        for row in getattr(comparison, name):
            parts.append(_dot(row, x(row.error), _TOP + _LINE * paths.index(row.path), colour))
    return "\n".join([*parts, "</svg>"])


def _grid(x: float, height: int, text: str) -> str:
    """Returns a vertical line and the label below it."""
    return (
        f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{height - 24}" stroke="#ddd"/>'
        f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{text}</text>'
    )


def _frame(comparison: Rows, width: int, height: int) -> str:
    title = html.escape(f"{comparison.name}: error against float32 {comparison.policy}")
    legend = "".join(
        f'<circle cx="{_LEFT + 110 * i}" cy="32" r="4" fill="{colour}"/>'
        f'<text x="{_LEFT + 110 * i + 10}" y="36">{name}</text>'
        for i, (name, colour) in enumerate(
            (name, colour) for name, colour in _SERIES if getattr(comparison, name)
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#222" role="img"><title>{title}</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="8" y="18" font-size="14">{title}</text>{legend}'
    )


def _label(path: str, y: float, is_jump: bool) -> str:
    colour = f' class="jump" fill="{_JUMP}"' if is_jump else ""
    name = path or "(outside of any module)"
    shown = name if len(name) <= 42 else "…" + name[-41:]
    return (
        f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end"{colour}>{html.escape(shown)}</text>'
    )


def _dot(row: Row, x: float, y: float, colour: str) -> str:
    fill = (
        f'class="jump" fill="{_JUMP}"'
        if row.is_jump or math.isinf(row.error)
        else f'fill="{colour}"'
    )
    error = figure(row.error, ".2e")
    said = f"{row.path or '(outside of any module)'}: error {error}, underflow {row.underflow:.2%}"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}>'
        f"<title>{html.escape(said)}</title></circle>"
    )


def _decades(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the powers of ten that enclose all finite errors."""
    errors = [row.error for row in rows if 0 < row.error < math.inf]
    if not errors:
        return -6, 0
    return max(math.floor(math.log10(min(errors))), -12), max(math.ceil(math.log10(max(errors))), 0)


def _along(error: float, low: int, high: int) -> float:
    """Returns the position of a finite error between the decades: 0, at the left, for no error."""
    return 0.0 if error <= 0 else min(max((math.log10(error) - low) / max(high - low, 1), 0.0), 1.0)


def plot(comparison: Rows, file: str | Path) -> None:
    """Draws the same chart with matplotlib, into a file.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure = _figure(comparison)
    figure.savefig(file, bbox_inches="tight", dpi=120)


def _figure(comparison: Rows) -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: it would open a window's backend
    except ImportError:
        raise ImportError(
            "Comparison.plot draws with matplotlib, which is not installed: pip install "
            "matplotlib. Comparison.to_svg() works without it."
        ) from None
    rows = (*comparison.activations, *comparison.gradients)
    paths = list(dict.fromkeys(row.path for row in rows))
    low, high = _decades(rows)
    figure = Figure(figsize=(9, 1.6 + 0.2 * len(paths)))
    axes = figure.add_subplot()
    for name, colour in _SERIES:
        _scatter(axes, getattr(comparison, name), paths, name, colour, (low, high))
    axes.set_yticks(
        range(len(paths)), [path or "(outside of any module)" for path in paths], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(10.0**low / 2, 10.0**high * 2)
    axes.set_xlabel("relative error against float32; at the right edge: it overflowed")
    axes.set_title(f"{comparison.name} {comparison.policy}", fontsize=9)
    if comparison.first_jump in paths:
        axes.axhline(
            paths.index(comparison.first_jump), color=_JUMP, lw=0.8, ls=":", label="first jump"
        )
    axes.grid(axis="x", alpha=0.3)
    if paths:
        axes.legend(fontsize=8)
    return figure


def _scatter(
    axes: Any,
    rows: Iterable[Row],
    paths: list[str],
    name: str,
    colour: str,
    decades: tuple[int, int],
) -> None:
    low, high = 10.0 ** decades[0] / 2, 10.0 ** decades[1] * 2
    points = [(min(max(row.error, low), high), paths.index(row.path), row) for row in rows]
    if points:
        colours = [
            _JUMP if row.is_jump or math.isinf(row.error) else colour for _, _, row in points
        ]
        axes.scatter(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            s=14,
            c=colours,
            label=name,
            zorder=3,
        )

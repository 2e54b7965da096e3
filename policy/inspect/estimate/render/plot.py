"""An estimate as a picture: the memory and the seconds of each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from policy.inspect.estimate.rows import EstimateRows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "arguments": "#3465a4",
    "temporaries": "#5a9c4b",
    "outputs": "#c4742a",
    "compute": "#3465a4",
    "exchanges": "#c4742a",
}
_LINE = "#a40000"
_LONGEST = 40  # characters of a name beside its bars
_MEMORY_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
_SECOND_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def estimate_figure(estimate: EstimateRows) -> Figure:
    """Draws bars of memory, beside the device's, and of seconds where they are known.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: it would open a window's backend
    except ImportError:
        raise ImportError(
            "Estimate.plot draws with matplotlib, which is not installed: pip install matplotlib"
        ) from None
    has_seconds = any(row.seconds is not None for row in estimate.rows)
    figure = Figure(figsize=(11 if has_seconds else 6.5, 1.9 + 0.45 * len(estimate.rows)))
    figure.set_layout_engine("constrained")
    panels: Any = figure.subplots(1, 1 + has_seconds, squeeze=False, sharey=True)[0]
    names = [_plain_text(_elided(row.name)) for row in estimate.rows]
    _memory(panels[0], estimate)
    if has_seconds:
        _seconds(panels[1], estimate)
    for axes in panels:
        _finish(axes)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    title = f"{estimate.name or 'A function'} on {estimate.target}"
    figure.suptitle(_plain_text(_elided(title, 90)), fontsize=10)
    return figure


def _memory(axes: Any, estimate: EstimateRows) -> None:
    parts = {
        name: [getattr(row, name) for row in estimate.rows]
        for name in ("arguments", "temporaries", "outputs")
    }
    largest = max([estimate.capacity, *(row.memory for row in estimate.rows)])
    scale = _stacked(axes, parts, "memory of a device", largest, _MEMORY_UNITS)
    if estimate.capacity:
        axes.axvline(estimate.capacity / scale, color=_LINE, lw=1, ls="--", label="device")


def _seconds(axes: Any, estimate: EstimateRows) -> None:
    known = [row if row.seconds is not None else None for row in estimate.rows]
    parts = {
        "compute": [(row and row.compute_seconds) or 0.0 for row in known],
        "exchanges": [(row and row.exchange_seconds) or 0.0 for row in known],
    }
    largest = max(row.seconds or 0.0 for row in estimate.rows)
    label = f"time by {estimate.timing}" if estimate.timing else "time"
    scale = _stacked(axes, parts, label, largest, _SECOND_UNITS)
    for i, row in enumerate(estimate.rows):
        if row.seconds is None or row.is_lower_bound:
            remark = " unknown" if row.seconds is None else " or more"
            axes.text((row.seconds or 0.0) / scale, i, remark, va="center", fontsize=8)


def _stacked(
    axes: Any,
    parts: Mapping[str, Sequence[float]],
    label: str,
    largest: float,
    units: Sequence[tuple[str, float]],
) -> float:
    """Draws bars that follow each other, and returns the size of their unit.

    Parts that no row has are left out.
    """
    unit, scale = next((unit for unit in units if largest >= unit[1]), units[-1])
    left: list[float] = []
    for name, sizes in parts.items():
        widths = [size / scale for size in sizes]
        left = left or [0.0] * len(sizes)
        if any(sizes):
            places = range(len(sizes))
            axes.barh(places, widths, left=left, height=0.6, color=_COLOURS[name], label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel(f"{label}, {unit}")
    return scale


def _finish(axes: Any) -> None:
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(
            fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False
        )


def _elided(name: str, longest: int = _LONGEST) -> str:
    half = longest // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def _plain_text(text: str) -> str:
    """Returns a text that matplotlib draws as it is: no mathematics, no control characters."""
    return "".join(c for c in text if c.isprintable()).replace("$", r"\$")

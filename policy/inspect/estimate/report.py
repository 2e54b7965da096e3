"""The result of an estimate: its rows, and the ways to show them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from policy.inspect.estimate.html import estimate_page
from policy.inspect.estimate.rows import EstimateRows, PolicyCost
from policy.inspect.estimate.text import estimate_text
from policy.inspect.render.plots import new_figure
from policy.inspect.render.text import shows_colour

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
_MEMORY_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
_SECOND_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


@dataclasses.dataclass(frozen=True)
class Estimate(EstimateRows):
    """The costs of a step under each policy on a target; returned by `policy.estimate`.

    >>> import jax, jax.numpy as jnp, policy
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> found = policy.estimate(jnp.matmul, x, x, policies=["float32", "bfloat16"], on="cpu")
    >>> [row.name for row in found.rows], dict(found["bfloat16"].matmul_flops)
    (['float32', 'bfloat16'], {'bfloat16': 1024})

    Attributes:
      name: of the function.
      target: the target's name.
      devices: how many it has.
      mesh: the axes of the mesh and their sizes; empty where rows have several.
      capacity: bytes of a device's memory; 0 if unknown.
      clock: Hz by which cycles become seconds; 0 where there are none.
      timing: where seconds come from: "the compiler's cycles", "a roofline of published peaks", or
        "" if there are none.
      source: the document of the device's figures.
      compiler: its name and version.
      rows: the costs, in the order of the policies.
      notes: remarks on the whole, as that nothing is sharded.
    """

    def to_html(self) -> str:
        """Returns the estimate as one self-contained HTML page."""
        return estimate_page(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draws the memory of each row beside the device's, and its seconds, with matplotlib; of a
        search also the front of time by memory.

        Args:
          path: a file to write, in the format of its ending, as ``.png`` or ``.svg``.

        Returns:
          The figure, which belongs to no window.

        Raises:
          ImportError: matplotlib is not installed.
        """
        figure = estimate_figure(self)
        if path is not None:
            figure.savefig(path, bbox_inches="tight", dpi=120)
        return figure

    def save(self, path: str | Path) -> None:
        """Writes an HTML page, JSON, or a plot as ``.png`` or ``.svg``, by the file's ending.

        Raises:
          ValueError: the file's name has another ending.
          ImportError: matplotlib, which draws the plot, is not installed.
        """
        path = Path(path)
        texts = {".html": self.to_html, ".json": self.to_json}
        if path.suffix in (".png", ".svg"):
            self.plot(path)
        elif path.suffix in texts:
            path.write_text(texts[path.suffix](), encoding="utf-8")
        else:
            raise ValueError(
                f"An estimate is saved as .html, .json, .png or .svg, but got {str(path)!r}."
            )

    def show(self, file: TextIO | None = None) -> None:
        """Prints the estimate to `file` or the standard output.

        It is in colour on a terminal, unless NO_COLOR is set.
        """
        print(estimate_text(self, colour=shows_colour(file or sys.stdout)), file=file)

    def __str__(self) -> str:
        return estimate_text(self)


# --------------------------------------------------------------------------------------------------
# The plot
# --------------------------------------------------------------------------------------------------


def estimate_figure(estimate: EstimateRows) -> Figure:
    """Draws bars of memory, beside the device's, and of seconds where they are known.

    Raises:
      ImportError: matplotlib is not installed.
    """
    rows = estimate.rows
    has_seconds = any(row.seconds is not None for row in rows)
    has_front = estimate.is_search and bool(estimate.front)
    size = (11 if has_seconds else 6.5, 1.9 + 0.45 * len(rows) + 4 * has_front)
    figure = new_figure("Estimate", figsize=size, layout="constrained")
    bars = figure
    if has_front:
        bars, below = figure.subfigures(2, 1, height_ratios=(size[1] - 4, 4))
        _front(below.subplots(), estimate)
    panels: Any = bars.subplots(1, 1 + has_seconds, squeeze=False, sharey=True)[0]
    parts = ("arguments", "temporaries", "outputs")
    memory = {name: [float(getattr(row, name)) for row in rows] for name in parts}
    largest = max([estimate.capacity, *(row.memory for row in rows)])
    label = "memory of a device"
    _stacked(panels[0], memory, label, largest, _MEMORY_UNITS, limit=estimate.capacity)
    if has_seconds:
        _seconds(panels[1], estimate)
    names = [_label(row.name, 40) for row in rows]
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    title = _label(f"{estimate.name or 'A function'} on {estimate.target}", 90)
    figure.suptitle(title, fontsize=10)
    return figure


def _seconds(axes: Any, estimate: EstimateRows) -> None:
    known = [row if row.seconds is not None else None for row in estimate.rows]
    parts = {
        "compute": [(row and row.compute_seconds) or 0.0 for row in known],
        "exchanges": [
            (row.seconds or 0.0) - (row.compute_seconds or 0.0) if row else 0.0 for row in known
        ],
    }
    largest = max(row.seconds or 0.0 for row in estimate.rows)
    label = f"time by {estimate.timing}" if estimate.timing else "time"
    scale = _stacked(axes, parts, label, largest, _SECOND_UNITS)
    for i, row in enumerate(estimate.rows):
        if row.seconds is None or row.is_lower_bound:
            remark = " unknown" if row.seconds is None else " or more"
            axes.text((row.seconds or 0.0) / scale, i, remark, va="center", fontsize=8)


def _front(axes: Any, estimate: EstimateRows) -> None:
    """Draws the time of an example, or of a step, by the memory of a device."""
    examples, front = estimate.compares_examples, estimate.front
    timed = [row for row in estimate.rows if row.seconds is not None]
    times = {row.name: (row.seconds_per_example if examples else row.seconds) or 0 for row in timed}
    second, shortest = _unit(max(times.values()), _SECOND_UNITS)
    gib, size = _unit(max(row.memory for row in timed), _MEMORY_UNITS)

    def place(rows: Sequence[PolicyCost]) -> tuple[list[float], list[float]]:
        return [row.memory / size for row in rows], [times[row.name] / shortest for row in rows]

    axes.plot(*place(front), "o-", color=_COLOURS["compute"], label="front", drawstyle="steps-pre")
    if beaten := [row for row in timed if row not in front]:
        axes.plot(*place(beaten), "o", color="#b0b0b0", label="other rows")
    for row, x, y in zip(front, *place(front), strict=True):
        said = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 7}
        axes.annotate(_label(row.name, 60), (x, y), **said)
    axes.margins(x=0.2, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if 0 < estimate.capacity / size < axes.get_xlim()[1]:
        axes.axvline(estimate.capacity / size, color=_LINE, lw=1, ls="--", label="device")
    axes.set_xlabel(f"memory of a device, {gib}")
    axes.set_ylabel(f"time of {'an example' if examples else 'a step'}, {second}")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Returns the largest unit that a number reaches, and its size."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def _stacked(
    axes: Any,
    parts: Mapping[str, Sequence[float]],
    label: str,
    largest: float,
    units: Sequence[tuple[str, float]],
    limit: float = 0.0,
) -> float:
    """Draws bars that follow each other, and a line at a limit; returns the size of their unit.

    Parts that no row has are left out.
    """
    unit, scale = _unit(largest, units)
    left: list[float] = []
    for name, sizes in parts.items():
        widths = [size / scale for size in sizes]
        left = left or [0.0] * len(sizes)
        if any(sizes):
            places = range(len(sizes))
            axes.barh(places, widths, left=left, height=0.6, color=_COLOURS[name], label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if limit:
        axes.axvline(limit / scale, color=_LINE, lw=1, ls="--", label="device")
    axes.set_xlabel(f"{label}, {unit}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    if axes.get_legend_handles_labels()[1]:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        axes.legend(fontsize=8, ncols=4, frameon=False, **place)
    return scale


def _label(text: str, longest: int) -> str:
    """Returns a text that matplotlib draws as it is, its middle left out where it is long: no
    mathematics, no control characters.
    """
    half = longest // 2
    text = text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"
    return "".join(c for c in text if c.isprintable()).replace("$", r"\$")

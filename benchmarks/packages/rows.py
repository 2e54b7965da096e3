"""Rows of the table, their bounds, and the page that they are written into."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import table as markdown_table
from benchmarks.packages.cases import AUTOCAST, OWN, PORT, Way
from benchmarks.packages.measure import Figures

SHARE, RATIO = (
    0.01,
    1.1,
)  # a port's bounds: FLOPs in float32; errors beside those of the model's own option
IDENTICAL = "identical"
_HEAD = ("model", "outputs", "beside", "gradients", "beside")


@dataclasses.dataclass(frozen=True)
class Row:
    """A model's figures.

    Attributes:
      name: the model's.
      ways: what was measured of each way to run it, or the first line of the error.
      swap: `IDENTICAL`, or what differs where the package imports our modules; "" where it was not
        tried.
    """

    name: str
    ways: Mapping[str, Figures | str]
    swap: str = ""

    def figures(self, way: Way) -> Figures | None:
        """Returns what was measured of one way; None where it failed or does not exist."""
        found = self.ways.get(way)
        return found if isinstance(found, Figures) else None

    def beside(self) -> Figures | None:
        """Returns what the port's errors are held against: those of an option that is in half, or
        of autocast.
        """
        own = self.figures(OWN)
        return own if own is not None and own.share <= SHARE else self.figures(AUTOCAST)

    def missed(self) -> Iterator[str]:
        """Yields the bounds that the port misses, as the names of their columns, and what fails."""
        yield from (
            way for way, found in self.ways.items() if isinstance(found, str) and way != OWN
        )
        port, beside = self.figures(PORT), self.beside()
        if port is not None and not port.share <= SHARE:
            yield "share"
        for quantity in ("outputs", "gradients") if port is not None and beside is not None else ():
            if not getattr(port, quantity) <= RATIO * getattr(beside, quantity):
                yield quantity
        if self.swap not in ("", IDENTICAL):
            yield "import swap"

    def cells(self) -> list[str]:
        """Returns the row's cells; a missed bound is in bold."""
        missed, cells = set(self.missed()), [self.name]
        for quantity in ("outputs", "gradients"):
            for found in (self.figures(PORT), self.beside()):
                cells.append("" if found is None else f"{getattr(found, quantity):.1e}")
            if quantity in missed:
                cells[-2] = f"**{cells[-2]}**"
        return cells

    def failures(self) -> str:
        """Returns what fails, and the bounds that no column has: one text, or ""."""
        port = self.figures(PORT)
        return "; ".join(
            [
                *(
                    f"{way}: {_cell(found)}"
                    for way, found in self.ways.items()
                    if isinstance(found, str) and way != OWN
                ),
                *([f"{port.share:.1%} in float32"] if port and "share" in self.missed() else []),
                *([f"import swap: {_cell(self.swap)}"] if "import swap" in self.missed() else []),
            ]
        )


def _cell(text: str, limit: int = 160) -> str:
    short = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return short.replace("|", "\\|").replace("<", "&lt;")


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table, and below it a list of what fails."""
    failing = [f"- {row.name}: {row.failures()}" for row in rows if row.failures()]
    made = markdown_table(_HEAD, [row.cells() for row in rows])
    return made + ("\n\n" + "\n".join(failing) if failing else "")

"""Tables of the benchmark: their Markdown, and their places in docs/eight_bits.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from benchmarks.markdown import into as markdown_into
from benchmarks.markdown import table as markdown_table
from benchmarks.markdown import version_of

_PACKAGES = ("jax", "flax", "optax")


@dataclasses.dataclass(frozen=True)
class Table:
    """Figures as text.

    Attributes:
      header: a name for each column.
      rows: a cell for each column.
      missed: the bounds that are missed, a line each.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    missed: tuple[str, ...] = ()

    @property
    def markdown(self) -> str:
        """The table in Markdown. The first column is aligned left, the others right."""
        return markdown_table(self.header, self.rows)


def environment() -> str:
    """Returns the versions and the backend that figures were measured with."""
    return ", ".join([*(f"{each} {version_of(each)}" for each in _PACKAGES), jax.default_backend()])


def into(page: str, name: str, table: Table) -> str:
    """Returns a page with one of its tables replaced, its command and its environment above it."""
    command = f"`python -m benchmarks.eight_bits --only {name}`, {environment()}:"
    return markdown_into(page, f"{command}\n\n{table.markdown}", f"eight_bits: {name}")


def shown(page: str, name: str) -> Sequence[tuple[str, ...]]:
    """Returns the lines of a table as a page shows it, header and rows, as cells."""
    opening = f"<!-- eight_bits: {name} -->"
    lines = page.partition(opening)[2].partition("<!-- end of ")[0].splitlines()
    cells = [tuple(map(str.strip, line.strip("|").split("|"))) for line in lines if line[:1] == "|"]
    return [*cells[:1], *cells[2:]]

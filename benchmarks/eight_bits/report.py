"""Tables of the benchmark: their Markdown, and their places in docs/eight_bits.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import jax

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
        rule = ("---", *("---:" for _ in self.header[1:]))
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.rows))


def environment() -> str:
    """Returns the versions and the backend that figures were measured with."""
    return ", ".join([*map(_version, _PACKAGES), jax.default_backend()])


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def marks(name: str) -> tuple[str, str]:
    """Returns the comments around a table of the page."""
    return f"<!-- eight_bits: {name} -->", f"<!-- end of {name} -->"


def section(name: str, table: Table) -> str:
    """Returns a table as the page shows it, with its command and its environment."""
    opening, closing = marks(name)
    command = f"`python -m benchmarks.eight_bits --only {name}`, {environment()}:"
    return "\n\n".join((f"{opening}\n{command}", table.markdown, closing))


def into(page: str, name: str, table: Table) -> str:
    """Returns a page with one of its tables replaced.

    Raises:
      ValueError: the page has no place for this table.
    """
    opening, closing = marks(name)
    before, found, rest = page.partition(opening)
    _, ended, after = rest.partition(closing)
    if not found or not ended:
        raise ValueError(f"The page has no place for a table {name!r}: {opening} ... {closing}.")
    return before + section(name, table) + after


def shown(page: str, name: str) -> Sequence[tuple[str, ...]]:
    """Returns the lines of a table as a page shows it, header and rows, as cells."""
    opening, closing = marks(name)
    lines = page.partition(opening)[2].partition(closing)[0].splitlines()
    cells = [tuple(map(str.strip, line.strip("|").split("|"))) for line in lines if line[:1] == "|"]
    return [*cells[:1], *cells[2:]]

"""A table of figures: rows under headings, as text for a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from policy.inspect.render.text import Paint, printable

UNKNOWN = "—"
Side = Literal["<", ">"]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    >>> from policy.inspect.render.table import Column
    >>> Column("memory", [4.0, 2.0, None], "{:.0f} GiB".format, is_compared=True).texts
    ['4 GiB', '2 GiB', '—']

    Attributes:
      head: its heading.
      values: the figure or the text of each row; None where it is unknown.
      form: writes a value.
      side: the side to which cells are aligned.
      is_compared: whether rows after the first show their ratio to the first.
      marks: a text before each cell, as "≥"; empty for none.
      styles: the style of each cell, as `Paint` names it; empty for none.
      unknown: the text of an unknown value.
      width: the least width in characters.
    """

    head: str
    values: Sequence[Any]
    form: Callable[[Any], str] = str
    side: Side = ">"
    is_compared: bool = False
    marks: Sequence[str] = ()
    styles: Sequence[str] = ()
    unknown: str = UNKNOWN
    width: int = 0

    @property
    def texts(self) -> list[str]:
        """The cell of each row, without ratios."""
        marks = self.marks or [""] * len(self.values)
        return [
            self.unknown if value is None else f"{mark} {self.form(value)}".lstrip()
            for mark, value in zip(marks, self.values, strict=True)
        ]

    @property
    def ratios(self) -> list[str]:
        """The ratio of each row to the first, as "x0.64"; "" of the first and of unknown ones.

        All are "" if no row differs from the first.
        """
        first, *others = self.values or [None]
        found = [_ratio(value, first) for value in others] if self.is_compared else []
        return ["", *found] if set(found) - {"", "x1.00"} else [""] * len(self.values)

    def lines(self, paint: Paint) -> list[str]:
        """Returns the heading and the cell of each row, all of one width."""
        cells = _aligned([self.head, *self.texts], self.side, self.width)
        if any(self.ratios):
            ratios = _aligned(["", *self.ratios], "<")
            cells = [f"{cell} {ratio}" for cell, ratio in zip(cells, ratios, strict=True)]
        return [cells[0], *map(paint, self.styles, cells[1:])] if self.styles else cells


def _ratio(value: Any, first: Any) -> str:
    if value is None or not first:
        return ""
    ratio = value / first
    return f"x{ratio:.2f}" if ratio < 100 else f"x{ratio:.0f}"


def _aligned(texts: Sequence[str], side: str, least: int = 0) -> list[str]:
    width = max(least, *map(len, texts))
    return [f"{text:{side}{width}}" for text in texts]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of figures under headings.

    >>> from policy.inspect.render.table import Column, Table
    >>> memory = Column("memory", [4, 2], "{} GiB".format, is_compared=True)
    >>> table = Table("policy", ["float32", "bfloat16"], [memory])
    >>> print(table)
      policy    memory
      float32    4 GiB
      bfloat16   2 GiB x0.50
    >>> table.to_json()
    [{'policy': 'float32', 'memory': 4}, {'policy': 'bfloat16', 'memory': 2}]

    Attributes:
      head: the heading of the names.
      names: the name of each row.
      columns: the columns, of one value for each row.
      width: the characters of a line. Columns that exceed it are below the others, under the names
        again.
      name_styles: the style of each name, as `Paint` names it; empty for none.
      longest: the longest name that a row begins with; a longer one is on a line above its row.
      least: the least width of the names.
    """

    head: str
    names: Sequence[str]
    columns: Sequence[Column]
    width: int = 100
    name_styles: Sequence[str] = ()
    longest: int = 32
    least: int = 0

    def to_json(self) -> list[dict[str, Any]]:
        """Returns an object for each row: its name and its values, by their headings."""
        rows = zip(*(column.values for column in self.columns), strict=True)
        heads = [column.head for column in self.columns]
        return [
            {self.head: name, **dict(zip(heads, values, strict=True))}
            for name, values in zip(self.names, rows, strict=True)
        ]

    def __str__(self) -> str:
        return self.text()

    def text(self, *, color: bool = False) -> str:
        """Returns the table as text, with escape codes for colors if `color` is set."""
        paint = Paint(color)
        return "\n\n".join("\n".join(self._lines(part, paint)) for part in self._parts(paint))

    @property
    def _name_width(self) -> int:
        most = max(len(name) for name in (self.head, *map(printable, self.names)))
        return max(self.least, min(most, self.longest))

    def _parts(self, paint: Paint) -> Iterator[list[list[str]]]:
        """Yields the lines of as many columns as there is room for side by side."""
        part: list[list[str]] = []
        room = self.width - 2 - self._name_width
        for lines in (column.lines(paint) for column in self.columns):
            if part and sum(2 + len(each[0]) for each in (*part, lines)) > room:
                yield part
                part = []
            part.append(lines)
        yield part

    def _lines(self, part: list[list[str]], paint: Paint) -> Iterator[str]:
        width = self._name_width
        heads, *rows = map("  ".join, zip(*part, strict=True))
        yield paint("bold", f"  {self.head:<{width}}  {heads}".rstrip())
        styles = self.name_styles or [""] * len(rows)
        for name, style, row in zip(map(printable, self.names), styles, rows, strict=True):
            if len(name) > width:
                lines = textwrap.wrap(
                    name, self.width, initial_indent="  ", subsequent_indent="    "
                )
                yield from (paint(style, line) for line in lines)
                name = ""
            if name or row.strip():
                yield f"  {paint(style, f'{name:<{width}}')}  {row}".rstrip()

"""An estimate as tables for a terminal of 100 columns."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TextIO

from policy.inspect.estimate.render.figures import (
    UNKNOWN,
    Figures,
    array_text,
    columns_of,
    count_that_fit,
    facts_of,
    has_exchanges,
    ratio,
    shares_text,
    uncounted_in,
    verdict,
)
from policy.inspect.estimate.rows import Buffer, EstimateRows, PolicyCost
from policy.inspect.render.terminal import Paint, short, shows_colour
from policy.inspect.render.units import amount, bytes_text, duration

_WIDTH = 100
_LONGEST = 32  # characters of a name that stands in its row; longer ones stand above theirs
_BUFFERS = 8
_STYLES = {True: "good", False: "bad", None: "dim"}


def show_estimate(estimate: EstimateRows, file: TextIO | None = None) -> None:
    """Prints an estimate, in colour where `file` is a terminal."""
    print(estimate_text(estimate, colour=shows_colour(file or sys.stdout)), file=file)


def estimate_text(estimate: EstimateRows, *, colour: bool = False) -> str:
    """Returns an estimate as text: the rows, their exchanges, and the buffers of those that lack
    memory.

    A figure beside "x" is a ratio of the first row's.
    """
    paint = Paint(colour)
    parts = [
        _head(estimate, paint),
        *_packed([_visible(row.name) for row in estimate.rows], _columns(estimate, paint), paint),
        _exchanges(estimate, paint),
        *(_buffers(row, paint) for row in estimate.rows if row.fits is False and row.buffers),
        _remarks(estimate, paint),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _visible(text: str) -> str:
    """Returns a text with its control characters escaped: a name can't move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _wrapped(text: str, first: str, indent: int) -> list[str]:
    return textwrap.wrap(
        _visible(text), _WIDTH, initial_indent=first, subsequent_indent=" " * indent
    )


def _head(estimate: EstimateRows, paint: Paint) -> Iterator[str]:
    fit = count_that_fit(estimate)
    title = f"estimate of {estimate.name or 'a function'}"
    lines = _wrapped(f"{title}: {fit}" if fit else title, "", 2)
    yield from (paint("bold", line) for line in lines)
    for word, said in facts_of(estimate):
        yield from _wrapped(said, f"  {word:<10}", 12)


# --------------------------------------------------------------------------------------------------
# The rows
# --------------------------------------------------------------------------------------------------


Column = list[str]  # a heading and the cell of each row, all of one width


def _columns(estimate: EstimateRows, paint: Paint) -> Iterator[Column]:
    rows = estimate.rows
    if any(row.fits is not None for row in rows):
        head, *cells = _aligned("fits", [verdict(row) for row in rows], "<")
        styles = [_STYLES[row.fits] for row in rows]
        yield [head, *map(paint, styles, cells)]
    has_code = any(row.code * 100 >= row.memory > 0 for row in rows)
    left_out = ("kernels", "compiled in", *(() if has_code else ("code",)))
    for column in columns_of(estimate):
        if column.head == "matmul FLOPs":
            yield _aligned(column.head, [_flops(row.matmul_flops) for row in rows], "<")
        elif column.head not in left_out:
            figures = _aligned(column.head, [column.text(row) for row in rows], ">")
            ratios = _aligned("", _ratios(column, rows), "<")
            yield [f"{f} {r}" if r else f for f, r in zip(figures, ratios, strict=True)]


def _aligned(head: str, cells: Sequence[str], side: str) -> Column:
    width = max(map(len, (head, *cells)))
    return [f"{cell:{side}{width}}" for cell in (head, *cells)]


def _ratios(column: Figures, rows: Sequence[PolicyCost]) -> Sequence[str]:
    """Returns the ratios of the rows beside the first; those of cycles are those of seconds."""
    values = [column.value(row) for row in rows]
    ratios = ["", *(ratio(value, values[0]) for value in values[1:])]
    is_alike = set(ratios) <= {"", "x1.00"} and not column.is_bound
    has_none = is_alike or not column.is_compared or column.head == "cycles"
    return [""] * len(rows) if has_none else ratios


def _flops(flops: Mapping[str, float]) -> str:
    """Returns FLOPs with the dtypes that they are in: "4 T in bf16 97.5%, f32 2.5%"."""
    total = sum(flops.values())
    return f"{amount(total)} in {shares_text(flops)}" if total else "none"


def _packed(
    names: Sequence[str], columns: Iterable[Column], paint: Paint
) -> Iterator[Iterable[str]]:
    """Yields tables of the columns, as many side by side as there is room for."""
    if not names:
        return
    width = min(max(map(len, (*names, "policy"))), _LONGEST)
    group: list[Column] = []
    for column in columns:
        if group and 2 + width + sum(2 + len(c[0]) for c in (*group, column)) > _WIDTH:
            yield _table(names, width, group, paint)
            group = []
        group.append(column)
    yield _table(names, width, group, paint)


def _table(
    names: Sequence[str], width: int, columns: Sequence[Column], paint: Paint
) -> Iterator[str]:
    header, *lines = map("  ".join, zip(*columns, strict=True))
    yield paint("bold", f"  {'policy':<{width}}  {header}".rstrip())
    for name, line in zip(names, lines, strict=True):
        if len(name) > width:
            yield from textwrap.wrap(name, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            name = ""
        yield f"  {name:<{width}}  {line}".rstrip()


# --------------------------------------------------------------------------------------------------
# Exchanges, buffers and remarks
# --------------------------------------------------------------------------------------------------


def _exchanges(estimate: EstimateRows, paint: Paint) -> Iterator[str]:
    if not has_exchanges(estimate):
        return
    yield paint("bold", "exchanges of a step")
    for row in estimate.rows:
        if row.collectives:
            yield from _wrapped(row.name, "  ", 4)
        for one in row.collectives:
            taken = UNKNOWN if one.seconds is None else f"≥ {duration(one.seconds)}"
            what = f"    {one.operation:<20}{short(one.dtype):<10}"
            yield f"{what}{bytes_text(one.bytes):>10}{taken:>14}"


def _buffers(row: PolicyCost, paint: Paint) -> Iterator[str]:
    lines = _wrapped(f"largest buffers of {row.name}, which {verdict(row)}", "", 2)
    yield from (paint("bold", line) for line in lines)
    for buffer in row.buffers[:_BUFFERS]:
        yield from _buffer(buffer)
    more = len(row.buffers) - _BUFFERS
    if more > 0:
        yield paint("dim", f"  {more} more in to_html() and to_json()")


def _buffer(buffer: Buffer) -> Iterator[str]:
    made = f" of {buffer.operation}" if buffer.operation else ""
    what = f"{array_text(buffer)}  {buffer.kind}{made}"
    where = "  ".join(filter(None, (buffer.path, buffer.source)))
    size = f"{bytes_text(buffer.bytes):>10}  "
    line = f"{size}{what}" + (f"  {where}" if where else "")
    if len(line) <= _WIDTH:
        yield _visible(line)
        return
    yield from _wrapped(what, size, 14)
    for part in filter(None, (buffer.path, buffer.source)):
        yield from _wrapped(part, " " * 14, 16)


def _remarks(estimate: EstimateRows, paint: Paint) -> Iterator[str]:
    uncounted = uncounted_in(estimate)
    if uncounted:
        yield paint("bold", "not counted")
    for what, names in uncounted:
        yield from _wrapped(f"{what} ({names})" if names else what, "  ", 4)
    if estimate.notes:
        yield paint("bold", "notes")
    for note in estimate.notes:
        yield from _wrapped(note, "  ", 4)

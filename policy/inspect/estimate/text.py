"""The figures of an estimate as words, and as tables for a terminal of 100 columns."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from policy.inspect.estimate.rows import Buffer, EstimateRows, PolicyCost
from policy.inspect.estimate.targets import axes_text
from policy.inspect.render.text import Paint, amount, bytes_text, duration, short

_WIDTH = 100
_MEMORY = ("memory", "arguments", "temporaries", "outputs", "code")
_LONGEST = 32  # characters of a name that stands in its row; longer ones stand above theirs
_BUFFERS = 8
_STYLES = {True: "good", False: "bad", None: "dim"}
UNKNOWN = "—"


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
    """A column of figures.

    Attributes:
      head: its heading.
      value: the figure of a row; None if it is unknown.
      form: writes a figure.
      is_compared: whether rows beside the first have ratios too.
      bound: the mark of a figure where seconds are a lower bound: "≥", or "≤" of one that falls
        with them.
    """

    head: str
    value: Callable[[PolicyCost], float | None]
    form: Callable[[float], str]
    is_compared: bool = True
    bound: str = ""

    def text(self, row: PolicyCost) -> str:
        """Returns the figure of a row: "≥ 1.2 ms" where it is a lower bound."""
        value = self.value(row)
        if value is None:
            return UNKNOWN
        mark = f"{self.bound} " if self.bound and row.is_lower_bound else ""
        return f"{mark}{self.form(value)}"


def columns_of(estimate: EstimateRows) -> list[Figures]:
    """Returns the columns of figures that any row has."""
    # Ratios of steps of several sizes say nothing.
    are_alike = len({row.batch for row in estimate.rows}) == 1
    memory = [
        Figures(
            part,
            functools.partial(memory_parts, part=part),
            bytes_text,
            part == "memory" and are_alike,
        )
        for part in _MEMORY
    ]
    flops = Figures("matmul FLOPs", lambda row: sum(row.matmul_flops.values()), amount, False)
    exchanges = [Figures("exchanges", exchanged_bytes, bytes_text, are_alike)]
    in_sequence = Figures("in sequence", lambda row: row.sequential_seconds, duration, False, "≥")
    measured = [
        Figures("on the host", lambda row: row.host or None, bytes_text, False),
        Figures("bytes", lambda row: row.bytes, bytes_text, are_alike),
        Figures("cycles", lambda row: row.cycles, amount, are_alike),
        Figures("seconds", lambda row: row.seconds, duration, are_alike, bound="≥"),
        *([in_sequence] if overlaps(estimate) else []),
        Figures("an example", lambda row: row.seconds_per_example, duration, bound="≥"),
        Figures("MFU", lambda row: row.mfu, "{:.1%}".format, False, bound="≤"),
        *(exchanges if has_exchanges(estimate) else []),
        Figures("kernels", lambda row: row.kernels, lambda count: f"{count:,.0f}", False),
        Figures("compiled in", lambda row: row.compile_seconds, duration, False),
    ]
    known = [one for one in measured if any(one.value(row) is not None for row in estimate.rows)]
    return [*memory, flops, *known]


def facts_of(estimate: EstimateRows) -> Iterator[tuple[str, str]]:
    """Yields the facts that hold for all rows: a word, and what there is to say of it."""
    memory = bytes_text(estimate.capacity) if estimate.capacity else "an unknown amount"
    devices = f"1 device of {memory} of memory"
    if estimate.devices > 1:
        devices = f"{estimate.devices} devices of {memory} of memory each"
    mesh = f"; mesh {axes_text(estimate.mesh)}" if estimate.mesh else ""
    yield "target", f"{estimate.target}: {devices}{mesh}"
    timing = estimate.timing or "unknown: this device has neither cycles nor published peaks"
    if estimate.clock:
        timing += f" at an assumed clock of {amount(estimate.clock, 'Hz')}"
    if any(row.is_lower_bound and row.seconds is not None for row in estimate.rows):
        timing += "; ≥ where some costs are not counted"
    yield "seconds", timing
    yield from _held(estimate)
    if estimate.source:
        yield "figures", estimate.source
    if estimate.compiler:
        yield "compiler", estimate.compiler
    if estimate.devices > 1:
        yield "counts", "FLOPs are of all devices together, all other figures per device"


def _held(estimate: EstimateRows) -> Iterator[tuple[str, str]]:
    """Yields the values that all rows of a search share, and how rows compare."""
    rows = estimate.rows
    if not estimate.is_search:
        return
    shared = {
        "policy": {row.policy for row in rows},
        "batch": {"" if row.batch is None else f"{row.batch} examples a step" for row in rows},
        "remat": {row.remat for row in rows},
    }
    for word, values in shared.items():
        if len(values) == 1 and (value := values.pop()):
            yield word, value
    if estimate.front:
        of = "an example" if estimate.compares_examples else "a step"
        yield "front", f"* no row that fits takes less time for {of} without more memory"


def overlaps(estimate: EstimateRows) -> bool:
    """Returns whether exchanges run beside kernels in any row."""
    return any(
        row.seconds is not None and row.seconds < 0.999 * (row.sequential_seconds or 0.0)
        for row in estimate.rows
    )


def noun(estimate: EstimateRows) -> str:
    """Returns the word for the rows: "policy", or "row" in a search."""
    return "row" if estimate.is_search else "policy"


def verdict(row: PolicyCost) -> str:
    """Returns whether a row fits, and by how much: "fits, 3.1 GiB spare" or "lacks 4.2 GiB"."""
    if row.fits is None:
        return UNKNOWN
    spare = row.spare or 0
    if row.fits:
        return f"fits, {bytes_text(spare)} spare"
    return f"lacks {bytes_text(-spare)}" if spare < 0 else "does not fit"


def count_that_fit(estimate: EstimateRows) -> str:
    """Returns a sentence's part on how many rows fit; "" if that is unknown."""
    known = [row.fits for row in estimate.rows if row.fits is not None]
    if not known:
        return ""
    rows = "rows" if estimate.is_search else "policies"
    if all(known):
        return "it fits" if len(known) == 1 else f"all {len(known)} {rows} fit"
    return "it does not fit" if len(known) == 1 else f"{sum(known)} of {len(known)} {rows} fit"


def exchanged_bytes(row: PolicyCost) -> float | None:
    """Returns the bytes of all exchanges of a row; None if its program didn't compile."""
    if row.kernels is None and not row.collectives:
        return None
    return float(sum(one.bytes for one in row.collectives))


def memory_parts(row: PolicyCost, part: str) -> int | None:
    """Returns the bytes of a part of a row's memory; None if the compiler gave up without any."""
    return None if row.is_exhausted and not row.memory else getattr(row, part)


def has_exchanges(estimate: EstimateRows) -> bool:
    """Returns whether any row exchanges anything."""
    return any(row.collectives for row in estimate.rows)


def ratio(value: float | None, first: float | None) -> str:
    """Returns a figure as a ratio of the first row's: "x0.64"; "" where there is none."""
    if value is None or not first:
        return ""
    found = value / first
    return f"x{found:.2f}" if found < 100 else f"x{found:.0f}"


def array_text(buffer: Buffer) -> str:
    """Returns the dtype and shape of an array: "bf16[8,128]"."""
    return f"{short(buffer.dtype)}[{','.join(map(str, buffer.shape))}]"


def remarks_of(estimate: EstimateRows) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields headings and remarks: each cost that is left out, with its rows unless it is left out
    of all, and notes.
    """
    uncounted: dict[str, list[str]] = {}
    for row in estimate.rows:
        for what in dict.fromkeys(row.uncounted):
            uncounted.setdefault(what, []).append(row.name)
    every = len(estimate.rows)
    costs = [
        what if len(names) == every else f"{what} ({', '.join(names)})"
        for what, names in uncounted.items()
    ]
    remarks = {"not counted": costs, "notes": estimate.notes}
    yield from ((heading, found) for heading, found in remarks.items() if found)


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


def estimate_text(estimate: EstimateRows, *, color: bool = False) -> str:
    """Returns an estimate as text: the rows, their exchanges, and the buffers of those that lack
    memory.

    A figure beside "x" is a ratio of the first row's. Of a search the exchanges are those of the
    front.
    """
    paint = Paint(color)
    shown = (estimate.front or estimate.rows[:1]) if estimate.is_search else estimate.rows
    parts = [
        _head(estimate, paint),
        *_packed(estimate, _columns(estimate, paint), paint),
        _exchanges(shown, paint),
        *(_buffers(row, paint) for row in shown if row.fits is False and row.buffers),
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
    if estimate.is_search and estimate.front:
        yield _aligned("front", ["*" if row in estimate.front else "" for row in rows], "<")
    has_code = any(row.code * 100 >= row.memory > 0 for row in rows)
    left_out = ("kernels", "compiled in", *(() if has_code else ("code",)))
    for column in columns_of(estimate):
        if column.head == "matmul FLOPs":
            yield _aligned(column.head, [_flops(row.matmul_flops) for row in rows], "<")
        elif column.head not in left_out:
            figures = _aligned(column.head, [column.text(row) for row in rows], ">")
            ratios = _aligned("", _ratios(column, rows), "<")
            yield [f"{f} {r}" if r else f for f, r in zip(figures, ratios, strict=True)]


def _flops(flops: Mapping[str, float]) -> str:
    """Returns FLOPs with the dtypes that they are in: "4 T in bf16 97.5%, f32 2.5%"."""
    total = sum(flops.values())
    shares = {short(dtype): part / total for dtype, part in flops.items() if part}
    if len(shares) > 1:
        shares = {f"{dtype} {share:.1%}": share for dtype, share in shares.items()}
    return f"{amount(total)} in {', '.join(shares)}" if total else "none"


def _aligned(head: str, cells: Sequence[str], side: str) -> Column:
    width = max(map(len, (head, *cells)))
    return [f"{cell:{side}{width}}" for cell in (head, *cells)]


def _ratios(column: Figures, rows: Sequence[PolicyCost]) -> Sequence[str]:
    """Returns the ratios of the rows beside the first; those of cycles are those of seconds."""
    values = [column.value(row) for row in rows]
    ratios = ["", *(ratio(value, values[0]) for value in values[1:])]
    is_alike = set(ratios) <= {"", "x1.00"} and not column.bound
    has_none = is_alike or not column.is_compared or column.head == "cycles"
    return [""] * len(rows) if has_none else ratios


def _packed(
    estimate: EstimateRows, columns: Iterable[Column], paint: Paint
) -> Iterator[Iterable[str]]:
    """Yields tables of the columns, as many side by side as there is room for."""
    if not estimate.rows:
        return
    head, *names = noun(estimate), *(_visible(row.name) for row in estimate.rows)
    width = min(max(map(len, (head, *names))), _LONGEST)
    table = functools.partial(_table, f"{head:<{width}}", names, paint=paint)
    group: list[Column] = []
    for column in columns:
        if group and 2 + width + sum(2 + len(c[0]) for c in (*group, column)) > _WIDTH:
            yield table(group)
            group = []
        group.append(column)
    yield table(group)


def _table(
    head: str, names: Sequence[str], columns: Sequence[Column], paint: Paint
) -> Iterator[str]:
    width = len(head)
    header, *lines = map("  ".join, zip(*columns, strict=True))
    yield paint("bold", f"  {head}  {header}".rstrip())
    for name, line in zip(names, lines, strict=True):
        if len(name) > width:
            yield from textwrap.wrap(name, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            name = ""
        yield f"  {name:<{width}}  {line}".rstrip()


# --------------------------------------------------------------------------------------------------
# Exchanges, buffers and remarks
# --------------------------------------------------------------------------------------------------


def _exchanges(rows: Sequence[PolicyCost], paint: Paint) -> Iterator[str]:
    if not any(row.collectives for row in rows):
        return
    yield paint("bold", "exchanges of a step")
    for row in rows:
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
        yield paint("dim", f"  {more} more in to_json()")


def _buffer(buffer: Buffer) -> Iterator[str]:
    made = f" of {buffer.operation}" if buffer.operation else ""
    size, what = f"{bytes_text(buffer.bytes):>10}  ", f"{array_text(buffer)}  {buffer.kind}{made}"
    parts = [part for part in (what, buffer.path, buffer.source) if part]
    line = size + "  ".join(parts)
    if len(line) <= _WIDTH:
        yield _visible(line)
        return
    yield from _wrapped(what, size, 14)
    for part in parts[1:]:
        yield from _wrapped(part, " " * 14, 16)


def _remarks(estimate: EstimateRows, paint: Paint) -> Iterator[str]:
    for heading, remarks in remarks_of(estimate):
        yield paint("bold", heading)
        for remark in remarks:
            yield from _wrapped(remark, "  ", 4)

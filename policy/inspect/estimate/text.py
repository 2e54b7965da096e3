"""An estimate as text for a terminal of 100 columns: its facts, and tables of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from policy.inspect.estimate.rows import Buffer, EstimateRows, PolicyCost
from policy.inspect.estimate.targets import axes_text
from policy.inspect.render.table import UNKNOWN, Column, Table
from policy.inspect.render.text import (
    Paint,
    amount,
    bytes_text,
    duration,
    short,
    wrapped,
)

_BUFFERS = 8
_STYLES = {True: "good", False: "bad", None: "dim"}


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


def table_of(estimate: EstimateRows) -> Table:
    """Returns the table of an estimate's figures, without columns that no row has."""
    columns = (*_memory_columns(estimate), *_time_columns(estimate))
    return Table(
        "row" if estimate.is_search else "policy",
        [row.name for row in estimate.rows],
        [one for one in columns if any(value is not None for value in one.values)],
    )


def _memory_columns(estimate: EstimateRows) -> Iterator[Column]:
    rows, has_front = estimate.rows, estimate.is_search and estimate.front
    styles = [_STYLES[row.fits] for row in rows]
    yield Column("fits", [verdict(row) for row in rows], side="<", styles=styles)
    if has_front:
        yield Column("front", ["*" if row in estimate.front else "" for row in rows], side="<")
    has_code = any(row.code * 100 >= row.memory > 0 for row in rows)
    for part in ("memory", "arguments", "temporaries", "outputs", *["code"][: int(has_code)]):
        # The compiler may give up without any figure.
        known = [getattr(row, part) if row.memory or not row.is_exhausted else None for row in rows]
        yield Column(part, known, bytes_text, is_compared=part == "memory" and _are_alike(rows))
    yield Column("on the host", [row.host or None for row in rows], bytes_text)


def _time_columns(estimate: EstimateRows) -> Iterator[Column]:
    rows, are_alike = estimate.rows, _are_alike(estimate.rows)
    least, most = ([mark if row.is_lower_bound else "" for row in rows] for mark in ("≥", "≤"))

    def column(head: str, value: str, form: Callable[[Any], str], **options: Any) -> Column:
        return Column(head, [getattr(row, value) for row in rows], form, **options)

    yield Column("matmul FLOPs", [flops_text(row.matmul_flops) for row in rows], side="<")
    yield column("bytes", "bytes", bytes_text, is_compared=are_alike)
    yield column("cycles", "cycles", amount)
    yield column("seconds", "seconds", duration, is_compared=are_alike, marks=least)
    if overlaps(estimate):
        yield column("in sequence", "sequential_seconds", duration, marks=least)
    yield column("an example", "seconds_per_example", duration, is_compared=True, marks=least)
    yield column("MFU", "mfu", "{:.1%}".format, marks=most)
    if any(row.collectives for row in rows):
        yield Column(
            "exchanges", list(map(exchanged_bytes, rows)), bytes_text, is_compared=are_alike
        )


def _are_alike(rows: Sequence[PolicyCost]) -> bool:
    """Returns whether rows compare: ratios of steps of several sizes say nothing."""
    return len({row.batch for row in rows}) == 1


def verdict(row: PolicyCost) -> str | None:
    """Returns whether a row fits, and by how much: "fits, 3.1 GiB spare" or "lacks 4.2 GiB"."""
    if row.fits is None:
        return None
    spare = row.spare or 0
    if row.fits:
        return f"fits, {bytes_text(spare)} spare"
    return f"lacks {bytes_text(-spare)}" if spare < 0 else "does not fit"


def exchanged_bytes(row: PolicyCost) -> float | None:
    """Returns the bytes of all exchanges of a row; None if its program didn't compile."""
    if row.kernels is None and not row.collectives:
        return None
    return float(sum(one.bytes for one in row.collectives))


def overlaps(estimate: EstimateRows) -> bool:
    """Returns whether exchanges run beside kernels in any row."""
    return any(
        row.seconds is not None and row.seconds < 0.999 * (row.sequential_seconds or 0.0)
        for row in estimate.rows
    )


def flops_text(flops: Mapping[str, float]) -> str:
    """Returns FLOPs with the dtypes that they are in: "4 T in bf16 97.5%, f32 2.5%"."""
    total = sum(flops.values())
    shares = {short(dtype): part / total for dtype, part in flops.items() if part}
    if len(shares) > 1:
        shares = {f"{dtype} {share:.1%}": share for dtype, share in shares.items()}
    return f"{amount(total)} in {', '.join(shares)}" if total else "none"


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
        "\n".join(_head(estimate, paint)),
        table_of(estimate).text(color=color) if estimate.rows else "",
        "\n".join(_exchanges(shown, paint)),
        *("\n".join(_buffers(row, paint)) for row in shown if row.fits is False and row.buffers),
        "\n".join(_remarks(estimate, paint)),
    ]
    return "\n\n".join(filter(None, parts))


def _head(estimate: EstimateRows, paint: Paint) -> Iterator[str]:
    title = f"estimate of {estimate.name or 'a function'}"
    known = [row.fits for row in estimate.rows if row.fits is not None]
    if len(known) == 1:
        title += ": it fits" if known[0] else ": it does not fit"
    elif known:
        rows = "rows" if estimate.is_search else "policies"
        how_many = f"all {len(known)}" if all(known) else f"{sum(known)} of {len(known)}"
        title += f": {how_many} {rows} fit"
    yield from (paint("bold", line) for line in wrapped(title, indent=2))
    for word, said in facts_of(estimate):
        yield from wrapped(said, f"  {word:<10}", 12)


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


def _exchanges(rows: Sequence[PolicyCost], paint: Paint) -> Iterator[str]:
    if not any(row.collectives for row in rows):
        return
    yield paint("bold", "exchanges of a step")
    for row in rows:
        if row.collectives:
            yield from wrapped(row.name, "  ", 4)
        for one in row.collectives:
            taken = UNKNOWN if one.seconds is None else f"≥ {duration(one.seconds)}"
            what = f"    {one.operation:<20}{short(one.dtype):<10}"
            yield f"{what}{bytes_text(one.bytes):>10}{taken:>14}"


def _buffers(row: PolicyCost, paint: Paint) -> Iterator[str]:
    lines = wrapped(f"largest buffers of {row.name}, which {verdict(row)}", indent=2)
    yield from (paint("bold", line) for line in lines)
    for buffer in row.buffers[:_BUFFERS]:
        yield from _buffer(buffer)
    more = len(row.buffers) - _BUFFERS
    if more > 0:
        yield paint("dim", f"  {more} more in to_json()")


def _buffer(buffer: Buffer) -> list[str]:
    made = f" of {buffer.operation}" if buffer.operation else ""
    array = f"{short(buffer.dtype)}[{','.join(map(str, buffer.shape))}]"
    parts = (f"{array}  {buffer.kind}{made}", buffer.path, buffer.source)
    return wrapped("  ".join(filter(None, parts)), f"{bytes_text(buffer.bytes):>10}  ", 14)


def _remarks(estimate: EstimateRows, paint: Paint) -> Iterator[str]:
    """Yields the costs that are left out, each with its rows unless all leave it out, and notes."""
    uncounted: dict[str, list[str]] = {}
    for row in estimate.rows:
        for what in dict.fromkeys(row.uncounted):
            uncounted.setdefault(what, []).append(row.name)
    costs = [
        what if len(names) == len(estimate.rows) else f"{what} ({', '.join(names)})"
        for what, names in uncounted.items()
    ]
    for heading, remarks in (("not counted", costs), ("notes", estimate.notes)):
        if remarks:
            yield paint("bold", heading)
        for remark in remarks:
            yield from wrapped(remark, "  ", 4)

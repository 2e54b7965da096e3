"""Renders an estimate as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from policy.inspect.estimate.render.figures import (
    UNKNOWN,
    array_text,
    count_that_fit,
    exchanged_bytes,
    facts_of,
    has_exchanges,
    memory_parts,
    ratio,
    seconds_text,
    uncounted_in,
    verdict,
)
from policy.inspect.estimate.rows import EstimateRows, PolicyCost
from policy.inspect.render.document import html_document, resource, search_box, section
from policy.inspect.render.markup import Markup, join_markup, tag
from policy.inspect.render.parts import OUTSIDE, Cell, bar, chip, table
from policy.inspect.render.units import amount, bytes_text, duration

_PARTS = ("arguments", "temporaries", "outputs", "code")
_CLASSES = {True: "fits", False: "lacks"}
_MODULES = 30  # rows of the table of modules


def estimate_page(estimate: EstimateRows) -> str:
    """Returns the page of an estimate: its rows, memory, FLOPs, exchanges, buffers and modules.

    It contains its own style and scripts and fetches nothing; names from the program are escaped.
    It is readable without scripts, which only sort and search.
    """
    name = estimate.name or "A function"
    facts = (join_markup((tag("dt", word), tag("dd", said))) for word, said in facts_of(estimate))
    header = [tag("h1", name)]
    fit = count_that_fit(estimate)
    if fit:
        header.append(tag("p", fit[0].upper() + fit[1:] + ".", class_="summary"))
    header.append(tag("dl", *facts, class_="facts"))
    header.append(search_box("policy, path, dtype, source …"))
    style = resource("policy.inspect.estimate.render", "estimate.css")
    title = f"Estimate of {name} on {estimate.target}"
    return html_document(title, header, _sections(estimate), style)


def _sections(estimate: EstimateRows) -> Iterator[Markup]:
    rows = estimate.rows
    yield section("costs", f"Policies ({len(rows)})", _costs(estimate))
    yield section("memory", "Memory of a device", *_memory(estimate))
    flops = [bar(f"{row.name}: FLOPs of matmuls", row.matmul_flops, amount) for row in rows]
    every = [bar(f"{row.name}: all FLOPs", row.flops, amount) for row in rows]
    yield section("flops", "FLOPs by dtype", *flops, *every)
    if has_exchanges(estimate):
        yield section("exchanges", "Exchanges between devices", _exchanges(rows))
    if any(row.buffers for row in rows):
        yield section("buffers", "Largest buffers", _buffers(rows))
    if any(row.cost_by_path for row in rows):
        yield section("modules", "Modules", *_modules(rows))
    remarks = list(_remarks(estimate))
    if remarks:
        yield section("remarks", "Remarks", *remarks)


# --------------------------------------------------------------------------------------------------
# The rows
# --------------------------------------------------------------------------------------------------


def _costs(estimate: EstimateRows) -> Markup:
    columns = [*_columns(estimate)]
    return table(
        [name for name, _ in columns],
        ([make(row) for _, make in columns] for row in estimate.rows),
    )


def _columns(estimate: EstimateRows) -> Iterator[tuple[str, Callable[[PolicyCost], Cell]]]:
    """Yields the headings of the columns that any row has, with the functions of their cells."""
    rows = estimate.rows
    first = rows[0] if rows else None
    yield "policy", lambda row: (join_markup((tag("strong", row.name), " ", _applied(row))), None)
    if any(row.fits is not None for row in rows):
        yield "fits", lambda row: (_verdict(row), None)
    yield (
        "memory",
        lambda row: _compared(memory_parts(row), first and memory_parts(first), bytes_text),
    )
    for part in _PARTS:
        yield part, lambda row, part=part: _compared(memory_parts(row, part), None, bytes_text)
    yield (
        "matmul FLOPs",
        lambda row: _compared(sum(row.matmul_flops.values()), None, amount),
    )
    if any(row.bytes is not None for row in rows):
        yield "bytes", lambda row: _compared(row.bytes, first and first.bytes, bytes_text)
    if any(row.cycles is not None for row in rows):
        yield "cycles", lambda row: _compared(row.cycles, first and first.cycles, amount)
    if any(row.seconds is not None for row in rows):
        yield "seconds", lambda row: _seconds(row, first)
    if has_exchanges(estimate):
        yield (
            "exchanges",
            lambda row: _compared(
                exchanged_bytes(row), first and exchanged_bytes(first), bytes_text
            ),
        )
    if any(row.kernels is not None for row in rows):
        yield "kernels", lambda row: _compared(row.kernels, None, lambda count: f"{count:,.0f}")
    yield "compiled in", lambda row: _compared(row.compile_seconds, None, duration)


def _applied(row: PolicyCost) -> Markup:
    said = ", ".join(filter(None, (row.policy if row.policy != row.name else "", row.route)))
    return tag("small", said)


def _verdict(row: PolicyCost) -> Markup:
    return tag("span", verdict(row), class_=None if row.fits is None else _CLASSES[row.fits])


def _compared(value: float | None, first: float | None, form: Callable[[float], str]) -> Cell:
    """Returns a figure and its ratio to the first row's."""
    if value is None:
        return UNKNOWN, None
    return join_markup((form(value), *_ratio(value, first))), value


def _seconds(row: PolicyCost, first: PolicyCost | None) -> Cell:
    if row.seconds is None:
        return UNKNOWN, None
    beside = _ratio(row.seconds, first.seconds if first is not None else None)
    return join_markup((seconds_text(row), *beside)), row.seconds


def _ratio(value: float, first: float | None) -> list[object]:
    found = ratio(value, first)
    return [" ", tag("small", found)] if found and value != first else []


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def _memory(estimate: EstimateRows) -> Iterator[Markup]:
    full = max([estimate.capacity, 1, *(row.memory for row in estimate.rows)])
    if estimate.capacity:
        memory = bytes_text(estimate.capacity)
        yield tag("p", f"The dashed line is the device's memory, {memory}.")
    for row in estimate.rows:
        yield _memory_bar(row, full)


def _memory_bar(row: PolicyCost, full: int) -> Markup:
    parts = {part: getattr(row, part) for part in _PARTS if getattr(row, part)}
    pieces = [
        tag("span", "", class_=f"piece {part}", style=f"width:{size / full:.4%}")
        for part, size in parts.items()
    ]
    line = tag("span", "", class_="capacity", style=f"left:{row.capacity / full:.4%}")
    said = ", ".join(f"{part} {bytes_text(size)}" for part, size in parts.items())
    legend = [
        tag("li", tag("span", part, class_=f"chip {part}"), f" {bytes_text(size)}")
        for part, size in parts.items()
    ]
    told = [": ", bytes_text(row.memory), *([", ", _verdict(row)] if row.fits is not None else [])]
    return tag(
        "figure",
        tag("figcaption", row.name, *told),
        tag(
            "div",
            tag("div", *pieces, class_="bar"),
            line if row.capacity else "",
            class_="memory",
            role="img",
            aria_label=f"Memory of {row.name}: {said}",
        ),
        tag("ul", *legend, class_="legend"),
    )


# --------------------------------------------------------------------------------------------------
# Exchanges, buffers, modules and remarks
# --------------------------------------------------------------------------------------------------


def _exchanges(rows: Sequence[PolicyCost]) -> Markup:
    return table(
        ("policy", "operation", "dtype", "bytes", "seconds, at least"),
        (
            (
                (row.name, None),
                (tag("code", one.operation), None),
                (chip(one.dtype), None),
                (bytes_text(one.bytes), one.bytes),
                (UNKNOWN, None) if one.seconds is None else (duration(one.seconds), one.seconds),
            )
            for row in rows
            for one in row.collectives
        ),
    )


def _buffers(rows: Sequence[PolicyCost]) -> Markup:
    return table(
        ("policy", "bytes", "array", "dtype", "kind", "operation", "path", "source"),
        (
            (
                (row.name, None),
                (bytes_text(buffer.bytes), buffer.bytes),
                (tag("code", array_text(buffer)), None),
                (chip(buffer.dtype), None),
                (buffer.kind, None),
                (tag("code", buffer.operation) if buffer.operation else "", None),
                (tag("span", buffer.path, class_="path"), None),
                (tag("span", buffer.source, class_="source"), None),
            )
            for row in rows
            for buffer in row.buffers
        ),
    )


def _modules(rows: Sequence[PolicyCost]) -> Iterator[Markup]:
    """Yields a table of the modules that cost most in any row, with a column for each row."""
    are_cycles = any(row.cycles is not None for row in rows)
    form = amount if are_cycles else duration
    paths = {path for row in rows for path in row.cost_by_path}
    most = sorted(paths, key=lambda path: -max(row.cost_by_path.get(path, 0.0) for row in rows))
    if len(most) > _MODULES:
        told = f"The {_MODULES} most expensive of {len(most)} modules."
        yield tag("p", told, class_="summary")
    unit = "cycles" if are_cycles else "seconds"
    yield table(
        ["path", *(f"{row.name}, {unit}" for row in rows)],
        (
            [
                (tag("span", path or OUTSIDE, class_="path"), None),
                *(_cost(row.cost_by_path.get(path), form) for row in rows),
            ]
            for path in most[:_MODULES]
        ),
    )


def _cost(value: float | None, form: Callable[[float], str]) -> Cell:
    return (UNKNOWN, 0.0) if value is None else (form(value), value)


def _remarks(estimate: EstimateRows) -> Iterator[Markup]:
    uncounted = uncounted_in(estimate)
    if uncounted:
        yield tag("h3", "Not counted")
        yield tag(
            "ul",
            *(tag("li", f"{what} ({names})" if names else what) for what, names in uncounted),
        )
    if estimate.notes:
        yield tag("h3", "Notes")
        yield tag("ul", *(tag("li", note) for note in estimate.notes))

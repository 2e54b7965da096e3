"""Renders an estimate as one self-contained HTML page."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from policy.inspect.estimate import text
from policy.inspect.estimate.rows import EstimateRows, PolicyCost
from policy.inspect.render.html import (
    MEMORY,
    OUTSIDE,
    Cell,
    Columns,
    Markup,
    bar,
    chip,
    html_document,
    join_markup,
    pieces,
    resource,
    search_box,
    section,
    table,
    tag,
)
from policy.inspect.render.text import amount, bytes_text, duration

_CLASSES = {True: "fits", False: "lacks"}
_MODULES = 30  # rows of the table of modules


def estimate_page(estimate: EstimateRows) -> str:
    """Returns the page of an estimate: its rows, memory, FLOPs, exchanges, buffers and modules.

    It contains its own style and scripts and fetches nothing; names from the program are escaped.
    It is readable without scripts, which only sort and search.
    """
    name = estimate.name or "A function"
    facts = (
        join_markup((tag("dt", word), tag("dd", said))) for word, said in text.facts_of(estimate)
    )
    fit = text.count_that_fit(estimate)
    header = [
        tag("h1", name),
        *([tag("p", f"{fit[0].upper()}{fit[1:]}.", class_="summary")] if fit else []),
        tag("dl", *facts, class_="facts"),
        search_box("policy, path, dtype, source …"),
    ]
    style = resource("policy.inspect.estimate", "estimate.css")
    title = f"Estimate of {name} on {estimate.target}"
    return html_document(title, header, _sections(estimate), style)


def _sections(estimate: EstimateRows) -> Iterator[Markup]:
    rows = estimate.rows
    columns: Columns = {text.noun(estimate): _policy}
    if any(row.fits is not None for row in rows):
        columns["fits"] = lambda row: (_verdict(row), None)
    if estimate.is_search and estimate.front:
        columns["front"] = lambda row: ("*" if row in estimate.front else "", None)
    for column in text.columns_of(estimate):
        columns[column.head] = functools.partial(_figure, column=column, rows=rows)
    heading = f"{'Rows' if estimate.is_search else 'Policies'} ({len(rows)})"
    yield section("costs", heading, table(columns, rows))
    yield section("memory", "Memory of a device", *_memory(estimate))
    flops = [bar(f"{row.name}: FLOPs of matmuls", row.matmul_flops, amount) for row in rows]
    every = [bar(f"{row.name}: all FLOPs", row.flops, amount) for row in rows]
    yield section("flops", "FLOPs by dtype", *flops, *every)
    if text.has_exchanges(estimate):
        yield section("exchanges", "Exchanges between devices", _exchanges(rows))
    if any(row.buffers for row in rows):
        yield section("buffers", "Largest buffers", _buffers(rows))
    if any(row.cost_by_path for row in rows):
        yield section("modules", "Modules", *_modules(rows))
    remarks = [
        part
        for head, found in text.remarks_of(estimate)
        for part in (tag("h3", head.capitalize()), tag("ul", *(tag("li", one) for one in found)))
    ]
    if remarks:
        yield section("remarks", "Remarks", *remarks)


# --------------------------------------------------------------------------------------------------
# The rows
# --------------------------------------------------------------------------------------------------


def _policy(row: PolicyCost) -> Cell:
    said = ", ".join(filter(None, (row.policy if row.policy != row.name else "", row.route)))
    return join_markup((tag("strong", row.name), " ", tag("small", said))), None


def _verdict(row: PolicyCost) -> Markup:
    return tag("span", text.verdict(row), class_=None if row.fits is None else _CLASSES[row.fits])


def _figure(row: PolicyCost, column: text.Figures, rows: Sequence[PolicyCost]) -> Cell:
    """Returns a figure and its ratio to the first row's."""
    value, beside = column.value(row), column.value(rows[0])
    compared = text.ratio(value, beside) if column.is_compared and value != beside else ""
    behind = (" ", tag("small", compared)) if compared else ()
    return join_markup((column.text(row), *behind)), value


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------


def _memory(estimate: EstimateRows) -> Iterator[Markup]:
    full = max([estimate.capacity, 1, *(row.memory for row in estimate.rows)])
    if estimate.capacity:
        memory = bytes_text(estimate.capacity)
        yield tag("p", f"The dashed line is the device's memory, {memory}.")
    yield from (_memory_bar(row, full) for row in estimate.rows)


def _memory_bar(row: PolicyCost, full: int) -> Markup:
    parts = {part: getattr(row, part) for part in MEMORY if getattr(row, part)}
    line = tag("span", "", class_="capacity", style=f"left:{row.capacity / full:.4%}")
    said = ", ".join(f"{part} {bytes_text(size)}" for part, size in parts.items())
    legend = [tag("li", chip(part), f" {bytes_text(size)}") for part, size in parts.items()]
    told = [": ", bytes_text(row.memory), *([", ", _verdict(row)] if row.fits is not None else [])]
    return tag(
        "figure",
        tag("figcaption", row.name, *told),
        tag(
            "div",
            tag("div", *pieces(parts, full), class_="bar"),
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
    columns: Columns = {
        "policy": lambda entry: (entry[0].name, None),
        "operation": lambda entry: (tag("code", entry[1].operation), None),
        "dtype": lambda entry: (chip(entry[1].dtype), None),
        "bytes": lambda entry: (bytes_text(entry[1].bytes), entry[1].bytes),
        "seconds, at least": lambda entry: _known(entry[1].seconds, duration, None),
    }
    return table(columns, ((row, one) for row in rows for one in row.collectives))


def _buffers(rows: Sequence[PolicyCost]) -> Markup:
    columns: Columns = {
        "policy": lambda entry: (entry[0].name, None),
        "bytes": lambda entry: (bytes_text(entry[1].bytes), entry[1].bytes),
        "array": lambda entry: (tag("code", text.array_text(entry[1])), None),
        "dtype": lambda entry: (chip(entry[1].dtype), None),
        "kind": lambda entry: (entry[1].kind, None),
        "operation": lambda entry: (entry[1].operation and tag("code", entry[1].operation), None),
        "path": lambda entry: (tag("span", entry[1].path, class_="path"), None),
        "source": lambda entry: (tag("span", entry[1].source, class_="source"), None),
    }
    return table(columns, ((row, buffer) for row in rows for buffer in row.buffers))


def _modules(rows: Sequence[PolicyCost]) -> Iterator[Markup]:
    """Yields a table of the modules that cost most in any row, with a column for each row."""
    are_cycles = any(row.cycles is not None for row in rows)
    form = amount if are_cycles else duration
    paths = dict.fromkeys(path for row in rows for path in row.cost_by_path)
    most = sorted(paths, key=lambda path: -max(row.cost_by_path.get(path, 0.0) for row in rows))
    if len(most) > _MODULES:
        told = f"The {_MODULES} most expensive of {len(most)} modules."
        yield tag("p", told, class_="summary")
    unit = "cycles" if are_cycles else "seconds"
    columns: Columns = {"path": lambda path: (tag("span", path or OUTSIDE, class_="path"), None)}
    for row in rows:
        columns[f"{row.name}, {unit}"] = lambda path, row=row: _known(
            row.cost_by_path.get(path), form, 0.0
        )
    yield table(columns, most[:_MODULES])


def _known(value: float | None, form: Callable[[float], str], unknown: float | None) -> Cell:
    return (text.UNKNOWN, unknown) if value is None else (form(value), value)

"""Parts of reports' pages: dtypes, shares, links, tables and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from policy.inspect.render.markup import Markup, escaped, tag

OUTSIDE = "(outside of any module)"
_KNOWN = ("float64", "float32", "bfloat16", "float16")
MEMORY = ("arguments", "temporaries", "outputs", "code")

# the content, and the number to sort by, or None to sort by text
Cell = tuple[object, float | None]
# the cells of a row, by their columns' names
Columns = dict[str, Callable[[Any], Cell]]


def table(columns: Columns, rows: Iterable[Any]) -> Markup:
    """Returns a table that sorts by a click on a heading, and becomes cards on narrow screens."""
    header = [
        tag("th", tag("button", name, type="button"), scope="col", aria_sort="none")
        for name in columns
    ]
    body = [tag("tr", *(_cell(name, cell(row)) for name, cell in columns.items())) for row in rows]
    return tag("table", tag("thead", tag("tr", *header)), tag("tbody", *body))


def _cell(column: str, cell: Cell) -> Markup:
    shown, value = cell
    if value is None:
        return tag("td", shown, data_label=column)
    return tag("td", shown, data_label=column, data_value=_sortable(value), class_="number")


def _sortable(value: float) -> object:
    """Returns a number as JavaScript reads it; NaN sorts as the worst."""
    return value if math.isfinite(value) else "-Infinity" if value < 0 else "Infinity"


def link(path: str, ids: Mapping[str, str]) -> Markup:
    """Returns a module's path, linked to its place in the tree if it has one."""
    return (
        tag("a", path or OUTSIDE, href=f"#{ids[path]}", class_="path")
        if path in ids
        else escaped(path or OUTSIDE)
    )


def pieces(shares: Mapping[str, float], total: float | None = None) -> list[Markup]:
    """Returns the pieces of a bar that `total` fills; None stands for the sum of the shares."""
    total = sum(shares.values()) if total is None else total
    widths = {dtype: amount / total for dtype, amount in shares.items() if amount}
    return [
        tag("span", "", class_=f"piece {colour(dtype)}", style=f"width:{width:.4%}")
        for dtype, width in widths.items()
    ]


def bar(what: str, shares: Mapping[str, float], form: Callable[[float], str]) -> Markup:
    """Returns shares by dtype as a bar and its legend."""
    total = sum(shares.values())
    if not total:
        return tag("figure", tag("figcaption", f"{what}: none"))
    parts = {dtype: amount / total for dtype, amount in shares.items() if amount}
    legend = [
        tag("li", chip(dtype), f" {share:.1%} ", tag("small", form(shares[dtype])))
        for dtype, share in parts.items()
    ]
    said = ", ".join(f"{dtype} {share:.1%}" for dtype, share in parts.items())
    return tag(
        "figure",
        tag("figcaption", f"{what}: {form(total)}"),
        tag(
            "div", *pieces(shares), class_="bar", role="img", aria_label=f"{what} by dtype: {said}"
        ),
        tag("ul", *legend, class_="legend"),
    )


def colour(dtype: str) -> str:
    """Returns the CSS class that colours a dtype, or a part of a device's memory."""
    if dtype in (*_KNOWN, *MEMORY):
        return dtype
    if re.fullmatch(r"float[1-8]\w*|int8", dtype):
        return "float8"  # the colour of 8 bits
    return "other"


def chip(dtype: str) -> Markup:
    return tag("span", dtype, class_=f"chip {colour(dtype)}") if dtype else Markup("")


def chips(dtypes: Iterable[str]) -> Iterable[Markup]:
    return map(chip, dtypes)


def figure(number: float, form: str) -> str:
    """Formats a number; infinities are written as signs, without a percent sign."""
    if math.isnan(number):
        return "NaN"
    return format(number, form) if math.isfinite(number) else "∞" if number > 0 else "-∞"

"""HTML pages of reports: escaping, and parts that pages share."""

from __future__ import annotations

import functools
import html
import math
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

OUTSIDE = "(outside of any module)"
_KNOWN = ("float64", "float32", "bfloat16", "float16")
MEMORY = ("arguments", "temporaries", "outputs", "code")

# the content, and the number to sort by, or None to sort by text
Cell = tuple[object, float | None]
# the cells of a row, by their columns' names
Columns = dict[str, Callable[[Any], Cell]]
# The browser refuses to fetch anything, even if a name in the program contains a link.
_NOTHING_FETCHED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Markup(str):
    """Text that is HTML, and is not escaped again."""

    __slots__ = ()


def escaped(text: object) -> Markup:
    """Returns any text as HTML that shows it."""
    return text if isinstance(text, Markup) else Markup(html.escape(str(text)))


def join_markup(parts: Iterable[object]) -> Markup:
    """Joins parts, escaping each unless it is `Markup`."""
    return Markup("".join(map(escaped, parts)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Returns an HTML element.

    Attributes are named as in HTML, with `_` for `-` and a trailing `_` after Python keywords.

    An attribute that is None or False is left out; one that is True has no value.
    """
    given = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            text = "" if value is True else f'="{escaped(value)}"'
            given += f" {key.rstrip('_').replace('_', '-')}{text}"
    return Markup(f"<{name}{given}>{join_markup(children)}</{name}>")


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def html_document(
    title: str, header: Iterable[Markup], sections: Iterable[Markup], style: str = ""
) -> str:
    """Returns a page of sections below a header.

    Its scripts sort tables, search rows if there is a search box, and open the targets of links.

    Args:
      title: of the window.
      header: elements above the sections.
      sections: elements, as `section` makes them.
      style: CSS beside that of all pages.
    """
    sheet = resource("policy.inspect.render", "page.css") + style
    head = (
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FETCHED}">'),
        tag("title", title),
        tag("style", Markup(sheet)),
    )
    body = (
        tag("header", *header),
        tag("main", *sections),
        tag("script", Markup(resource("policy.inspect.render", "page.js"))),
    )
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


@functools.cache
def resource(package: str, name: str) -> str:
    """Returns the text of a file in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def section(name: str, title: str, *parts: Markup) -> Markup:
    """Returns a section with a heading, whose HTML id is `name`."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *parts, id=name, aria_labelledby=f"{name}-title")


def search_box(hint: str) -> Markup:
    """Returns the box that searches the rows of a page's tables."""
    box = tag("input", id="search", type="search", placeholder=hint, autocomplete="off")
    label = tag("label", "Search ", Markup(box.removesuffix("</input>")))
    return tag("p", label, " ", tag("output", "", id="matches", for_="search"), role="search")


# --------------------------------------------------------------------------------------------------
# Tables, links and shares
# --------------------------------------------------------------------------------------------------


def table(columns: Columns, rows: Iterable[Any]) -> Markup:
    """Returns a table that sorts by a click on a heading, and becomes cards on narrow screens."""
    buttons = [tag("button", name, type="button") for name in columns]
    header = [tag("th", button, scope="col", aria_sort="none") for button in buttons]
    body = [tag("tr", *(_cell(name, cell(row)) for name, cell in columns.items())) for row in rows]
    return tag("table", tag("thead", tag("tr", *header)), tag("tbody", *body))


def _cell(column: str, cell: Cell) -> Markup:
    shown, value = cell
    if value is None:
        return tag("td", shown, data_label=column)
    # As JavaScript reads it; NaN sorts as the worst.
    number = value if math.isfinite(value) else "-Infinity" if value < 0 else "Infinity"
    return tag("td", shown, data_label=column, data_value=number, class_="number")


def link(path: str, ids: Mapping[str, str]) -> Markup:
    """Returns a module's path, linked to its place in the tree if it has one."""
    if path not in ids:
        return escaped(path or OUTSIDE)
    return tag("a", path or OUTSIDE, href=f"#{ids[path]}", class_="path")


def pieces(shares: Mapping[str, float], total: float | None = None) -> list[Markup]:
    """Returns the pieces of a bar that `total` fills; None stands for the sum of the shares."""
    total = sum(shares.values()) if total is None else total
    parts = ((f"piece {colour(one)}", amount / total) for one, amount in shares.items() if amount)
    return [tag("span", "", class_=name, style=f"width:{width:.4%}") for name, width in parts]


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
    label = f"{what} by dtype: {said}"
    drawn = tag("div", *pieces(shares), class_="bar", role="img", aria_label=label)
    caption = tag("figcaption", f"{what}: {form(total)}")
    return tag("figure", caption, drawn, tag("ul", *legend, class_="legend"))


def colour(dtype: str) -> str:
    """Returns the CSS class that colours a dtype, or a part of a device's memory."""
    if dtype in (*_KNOWN, *MEMORY):
        return dtype
    if re.fullmatch(r"float[1-8]\w*|int8", dtype):
        return "float8"  # the colour of 8 bits
    return "other"


def chip(dtype: str) -> Markup:
    return tag("span", dtype, class_=f"chip {colour(dtype)}") if dtype else Markup("")


def figure(number: float, form: str) -> str:
    """Formats a number; infinities are written as signs, without a percent sign."""
    if math.isnan(number):
        return "NaN"
    return format(number, form) if math.isfinite(number) else "∞" if number > 0 else "-∞"

"""A self-contained HTML page: its style and scripts within, and nothing fetched."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import resources

from policy.inspect.render.markup import Markup, join_markup, tag

# The browser refuses to fetch anything, even if a name in the program contains a link.
_NOTHING_FETCHED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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
    head = join_markup(
        (
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_FETCHED}">'),
            tag("title", title),
            tag("style", Markup(resource("policy.inspect.render", "page.css") + style)),
        )
    )
    body = join_markup(
        (
            tag("header", *header),
            tag("main", *sections),
            tag("script", Markup(resource("policy.inspect.render", "page.js"))),
        )
    )
    return f"<!DOCTYPE html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


@functools.cache
def resource(package: str, name: str) -> str:
    """Returns the text of a file in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def section(name: str, title: str, *parts: Markup) -> Markup:
    """Returns a section with a heading, whose HTML id is `name`."""
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        *parts,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def search_box(hint: str) -> Markup:
    """Returns the box that searches the rows of a page's tables."""
    box = tag("input", id="search", type="search", placeholder=hint, autocomplete="off")
    box = Markup(box.removesuffix("</input>"))
    return tag(
        "p",
        tag("label", "Search ", box),
        " ",
        tag("output", "", id="matches", for_="search"),
        role="search",
    )

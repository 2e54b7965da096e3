"""HTML that is escaped unless it is HTML already."""

from __future__ import annotations

import html
from collections.abc import Iterable


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
    given = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    return Markup(f"<{name}{''.join(given)}>{join_markup(children)}</{name}>")

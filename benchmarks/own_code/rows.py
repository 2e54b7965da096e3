"""Rows of the table, their bounds, and their place in docs/own_layers.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import table as markdown_table
from benchmarks.own_code.measure import POLICIES, Figures
from benchmarks.own_code.models import WAYS

OPENING, CLOSING = "<!-- own code -->", "<!-- end of own code -->"
RATIO = 1.25  # the largest error beside autocast's
Key = tuple[str, str]  # a policy and a way


@dataclasses.dataclass(frozen=True)
class Row:
    """A snippet's figures by policy and way, or the first line of an error."""

    name: str
    found: Mapping[Key, Figures | str]

    def missed(self) -> Iterator[str]:
        """Yields a line for each bound that is missed, and for each error."""
        for (policy, way), figures in self.found.items():
            where = f"{self.name}, {way}, {policy}"
            if isinstance(figures, str):
                yield f"{where}: {figures}"
                continue
            for count, what in (
                (figures.float32_matmuls, "float32 matmuls"),
                (figures.half_sums, "half sums"),
            ):
                if count:
                    yield f"{where}: {what} {count}, bound 0"
            if not figures.ratio <= RATIO:
                errors = f"{figures.error:.1e} / {figures.autocast_error:.1e}"
                yield f"{where}: an error of {figures.ratio:.2f} ({errors}), bound {RATIO}"

    def cells(self) -> list[str]:
        """Returns the row's cells; a missed bound is in bold."""
        measured = [each for each in self.found.values() if isinstance(each, Figures)]
        counts = [
            max((each.float32_matmuls for each in measured), default=0),
            max((each.half_sums for each in measured), default=0),
        ]
        ratios = [_ratio(self.found.get((p, way), "")) for p in POLICIES for way in WAYS]
        return [self.name, *(f"**{count}**" if count else "0" for count in counts), *ratios]


def _ratio(figures: Figures | str) -> str:
    if isinstance(figures, str):
        return "**fails**" if figures else ""
    return f"{figures.ratio:.2f}" if figures.ratio <= RATIO else f"**{figures.ratio:.2f}**"


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table: the most matmuls and sums of all models of a snippet,
    and the ratios of errors of each.
    """
    ratios = [
        f"{policy.removeprefix('mixed_')}: {way}" if way == WAYS[0] else way
        for policy in POLICIES
        for way in WAYS
    ]
    head = ["code", "float32 matmuls", "half sums", *ratios]
    return markdown_table(head, [row.cells() for row in rows])


def into(page: str, part: str) -> str:
    """Returns a page with the text between its markers replaced.

    Raises:
      ValueError: the page has not both markers, in their order.
    """
    before, opening, rest = page.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not (opening and closing):
        raise ValueError(f"The page should have {OPENING} and, after it, {CLOSING}.")
    return f"{before}{OPENING}\n\n{part}\n\n{CLOSING}{after}"

"""Rows of the table, their bounds, and their place in docs/own_layers.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.markdown import table as markdown_table
from benchmarks.own_code.measure import POLICIES, Figures
from benchmarks.own_code.models import WAYS

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
        """Returns the row's cells: the largest ratio of errors of each policy, in bold beyond the
        bound.
        """
        by_policy = [[self.found.get((policy, way), "") for way in WAYS] for policy in POLICIES]
        return [self.name, *map(_largest, by_policy)]

    def counted(self) -> str:
        """Returns the most float32 matmuls and half sums of all models, "" if there are none."""
        measured = [each for each in self.found.values() if isinstance(each, Figures)]
        matmuls = max((each.float32_matmuls for each in measured), default=0)
        sums = max((each.half_sums for each in measured), default=0)
        if not matmuls and not sums:
            return ""
        return f"- **{self.name}**: {matmuls} float32 matmuls, {sums} half sums"


def _largest(found: Sequence[Figures | str]) -> str:
    if any(isinstance(each, str) and each for each in found):
        return "**fails**"
    ratios = [each.ratio for each in found if isinstance(each, Figures)]
    if not ratios:
        return ""
    within = all(ratio <= RATIO for ratio in ratios)  # NaN is not
    return f"{max(ratios):.2f}" if within else f"**{max(ratios):.2f}**"


def table(rows: Sequence[Row]) -> str:
    """Returns the ratios of errors as a Markdown table, and a list of the rows with float32 matmuls
    and half sums.
    """
    head = ["code", *(policy.removeprefix("mixed_") for policy in POLICIES)]
    counted = "\n".join(filter(None, (row.counted() for row in rows)))
    made = markdown_table(head, [row.cells() for row in rows])
    return f"{made}\n\n{counted}" if counted else made

"""Records of a run, turned around: the numbers of one row of all steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RunRecord = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Series:
    """The numbers of one row over the steps that were recorded.

    Attributes:
      path, kind, dtype, line: of the row.
      layer: the step of the scan, None outside of scans.
      size: the number of elements.
      steps: whole numbers, (n,).
      numbers: by name, (n,) in float64; NaN where a record has no such number.
      devices: by step, of the records that name devices.
    """

    path: str
    kind: str
    layer: int | None
    dtype: str
    line: str
    size: int
    steps: np.ndarray
    numbers: Mapping[str, np.ndarray]
    devices: Mapping[int, tuple[int, ...]]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the numbers of a name; NaN if the row has none."""
        return self.numbers.get(name, np.full(len(self.steps), np.nan))

    @property
    def lost(self) -> np.ndarray:
        """The shares of numbers that the row's dtype doesn't hold, or of updates that vanish."""
        names = ("lost",) if "lost" in self.numbers else ("below", "above", "nan", "inf")
        if self.kind == "update" and "lost" not in self.numbers:
            names = ("nan", "inf")
        return np.minimum(sum(np.nan_to_num(self[name]) for name in names), 1.0)

    @property
    def not_finite(self) -> np.ndarray:
        """The shares of NaN and infinite numbers."""
        return np.nan_to_num(self["nan"]) + np.nan_to_num(self["inf"])


RowKey = tuple[str, str, int | None]  # path, kind, layer
Rows = Mapping[RowKey, Series]


def is_ordinary(record: RunRecord) -> bool:
    """Returns whether a step was finite and was not skipped."""
    return record["first"] is None and not record["skipped"]


def series_of(records: Sequence[RunRecord]) -> Rows:
    """Returns the rows of records, in the order of the first record that has them."""
    found: dict[RowKey, list[tuple[int, dict[str, float], Any]]] = {}
    for record in records:
        for row in record["rows"]:
            for layer, numbers in _by_layer(row["numbers"]):
                key = row["path"], row["kind"], layer
                found.setdefault(key, []).append((record["step"], numbers, row))
    return {key: _series(*key, entries) for key, entries in found.items()}


def _by_layer(numbers: Mapping[str, Any]) -> list[tuple[int | None, dict[str, float]]]:
    counts = [len(number) for number in numbers.values() if isinstance(number, list)]
    if not counts:
        return [(None, {name: float(number) for name, number in numbers.items()})]
    return [
        (
            layer,
            {n: float(one[layer] if isinstance(one, list) else one) for n, one in numbers.items()},
        )
        for layer in range(max(counts))
    ]


def _series(path: str, kind: str, layer: int | None, entries: Sequence[Any]) -> Series:
    steps = np.array([step for step, _, _ in entries])
    names = dict.fromkeys(name for _, numbers, _ in entries for name in numbers)
    columns = {
        name: np.array([numbers.get(name, np.nan) for _, numbers, _ in entries]) for name in names
    }
    row = entries[-1][2]
    devices = {
        step: tuple(one["devices"]) for step, _, one in entries if one.get("devices") is not None
    }
    given = (row["dtype"], row.get("line") or "", row["size"])
    return Series(path, kind, layer, *given, steps, columns, devices)


def longest_streak(flags: np.ndarray) -> tuple[int, int] | None:
    """Returns the first and last place of the longest run of True, None if there is none.

    >>> longest_streak(np.array([True, False, True, True]))
    (2, 3)
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    if not edges.size:
        return None
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest]) - 1

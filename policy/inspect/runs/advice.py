"""Advice about a run: its faults, their places and first steps, and the remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from policy.inspect.runs.advice_kinds import ADVICE_KINDS as ADVICE_KINDS
from policy.inspect.runs.advice_kinds import Advice as Advice
from policy.inspect.runs.history import RunRecord, is_ordinary, series_of
from policy.inspect.runs.not_finite import not_finite, skips
from policy.inspect.runs.ranges import dead, eight_bits, near_overflow, underflow, vanished
from policy.inspect.runs.spikes import spikes

_BY_ROW = (vanished, underflow, near_overflow, eight_bits)


def advise(records: Sequence[RunRecord]) -> tuple[Advice, ...]:
    """Returns the faults of a run, the gravest kind first, and in a kind the earliest.

    Args:
      records: of a run, in the order of their steps, as `RunLog.records` returns them.
    """
    rows = series_of([record for record in records if is_ordinary(record)])
    every = [*rows.values()]
    inputs = [
        {**record, "rows": [row for row in record["rows"] if row["kind"] == "input"]}
        for record in records
    ]
    found = [*not_finite(records), *skips(records), *dead(every)]
    found += spikes([*series_of(inputs).values()], every)
    found += [advice for row in every for check in _BY_ROW for advice in check(row, rows)]
    order = list(ADVICE_KINDS)
    return tuple(sorted(_joined(found), key=lambda one: (order.index(one.kind), one.step)))


def _joined(found: Sequence[Advice]) -> Iterator[Advice]:
    """Yields advice of all layers of a scan as one, the earliest one's."""
    kinds: dict[tuple[str, str, str], list[Advice]] = {}
    for one in found:
        place = one.line if not one.layers else ""
        kinds.setdefault((one.kind, one.path, place), []).append(one)
    for alike in kinds.values():
        first = min(alike, key=lambda one: one.step)
        layers = tuple(sorted({layer for one in alike for layer in one.layers}))
        until = max(one.until for one in alike)
        yield dataclasses.replace(first, layers=layers, until=until)

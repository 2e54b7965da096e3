"""Advice on single steps that are far from the run's own history: batches, devices, updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policy.inspect.runs import advice_kinds as kinds
from policy.inspect.runs.advice_kinds import Advice
from policy.inspect.runs.history import Series

_RECENT = 8  # records before a spike, and the most after it, that it is compared with


def spikes(inputs: Sequence[Series], rows: Sequence[Series]) -> Iterator[Advice]:
    """Yields advice on steps whose inputs, gradients or updates are far larger than before.

    Args:
      inputs: rows of the inputs, of all steps.
      rows: of the steps that are finite and not skipped.
    """
    yield from _devices(rows)
    found: dict[int, Advice] = {}
    for row in inputs:
        for place, times in _jumps(row["largest"]):
            step = int(row.steps[place])
            said = f"The largest number of the input {row.path} is {times:.3g} times that before"
            found.setdefault(step, _of_batch(row.path, step, said))
    grown: dict[str, dict[int, float]] = {}
    for kind in ("gradient", "update"):
        alike = [row for row in rows if row.kind == kind]
        steps, norms = _norms(alike)
        grown[kind] = {int(steps[place]): times for place, times in _jumps(norms)}
    for step, times in grown["gradient"].items():
        path = _most_grown([row for row in rows if row.kind == "gradient"], step)
        said = f"The gradients are {times:.3g} times as large as before, here most"
        found.setdefault(step, _of_batch(path, step, said))
    yield from found.values()
    for step, times in grown["update"].items():
        if step in found:
            continue
        path = _most_grown([row for row in rows if row.kind == "update"], step)
        message = (
            f"The updates are {times:.3g} times as large as before, and the gradients are not: "
            "look at the learning rate's schedule at this step, and at the optimizer's epsilon."
        )
        yield Advice(kinds.SPIKE, path, step, step, message)


def _of_batch(path: str, step: int, said: str) -> Advice:
    remedy = f"Look at batch {step}; clip_global_norm= in mixed_precision bounds what it does"
    return Advice(kinds.BATCH, path, step, step, f"{said}. {remedy}.")


def _jumps(values: np.ndarray) -> Iterator[tuple[int, float]]:
    """Yields the places of spikes and how many times they exceed the records before.

    A spike exceeds `TIMES` times the recent records and twice all before, and those that follow
    are nearer to the recent ones.
    """
    values = np.nan_to_num(values)
    for place in range(kinds.BEFORE, len(values)):
        before, after = values[:place], values[place + 1 : place + 1 + _RECENT]
        recent = before[-_RECENT:].max()
        if np.median(before) <= 0 or values[place] <= max(kinds.TIMES * recent, 2 * before.max()):
            continue
        if after.size and np.median(after) > np.sqrt(values[place] * recent):
            continue
        yield place, float(values[place] / recent)


def _norms(rows: Sequence[Series]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps, and the root of the mean square of all rows together at each."""
    sums: dict[int, tuple[float, int]] = {}
    for row in rows:
        for step, square in zip(row.steps, np.nan_to_num(row["mean_square"]), strict=True):
            total, size = sums.get(int(step), (0.0, 0))
            sums[int(step)] = total + float(square) * row.size, size + row.size
    steps = sorted(sums)
    values = [np.sqrt(sums[step][0] / max(sums[step][1], 1)) for step in steps]
    return np.array(steps), np.array(values)


def _most_grown(rows: Sequence[Series], step: int) -> str:
    """Returns the path of the row that exceeds its own history most at a step."""

    def growth(row: Series) -> float:
        before, at = row["largest"][row.steps < step], row["largest"][row.steps == step]
        if not before.size or not at.size or not before.max():
            return 0.0
        return float(at[0] / before[-_RECENT:].max()) if before[-_RECENT:].max() else 0.0

    return max(rows, key=growth).path


def _devices(rows: Sequence[Series]) -> Iterator[Advice]:
    """Yields advice on one device whose numbers are far off, in two or more records."""
    named: dict[int, list[tuple[int, Series]]] = {}
    for row in rows:
        for step, devices in row.devices.items():
            if len(devices) == 1:
                named.setdefault(devices[0], []).append((step, row))
    for device, places in named.items():
        steps = sorted({step for step, _ in places})
        if len(named) == 1 and len(steps) >= 2:
            row = min(places, key=lambda one: one[0])[1]
            message = (
                f"The numbers of device {device} are far larger than those of the others, in "
                f"{len(steps)} records. Look at the data that it gets, and at the device."
            )
            yield Advice(kinds.DEVICE, row.path, steps[0], steps[-1], message, row.line)

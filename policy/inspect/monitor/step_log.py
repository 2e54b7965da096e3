"""Measurements in the program of a step, and the rows that records have of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from policy.inspect.monitor.snapshot import KINDS, Kind, NumbersPlace, SnapshotRow, SnapshotRows
from policy.inspect.monitor.step import TrainStep
from policy.inspect.traced.module_paths import lost_prefixes
from policy.programs.paths import Path, naming, spelled

Where = Path | str  # of a module, or of an array among the arguments


@dataclasses.dataclass
class StepLog:
    """The values that were measured.

    Attributes:
      places: those of the numbers, by their keys.
      rows: the line and the keys of the values of each path, kind and dtype.
      leaves: the keys of arrays of a leaf, of a kind.
      operations: those that may make infinities, in program order: path, direction, operation,
        line and dtype.
      firsts: the keys of the first of them in each program inside the step.
      entered: the key of the codes of the step's arguments.
    """

    places: dict[int, NumbersPlace] = dataclasses.field(default_factory=dict)
    rows: dict[tuple[Where, Kind, str], tuple[str, dict[int, None]]] = dataclasses.field(
        default_factory=dict
    )
    leaves: dict[tuple[Kind, int], int] = dataclasses.field(default_factory=dict)
    operations: list[tuple[Where, str, str, str, str]] = dataclasses.field(default_factory=list)
    firsts: list[int] = dataclasses.field(default_factory=list)
    entered: int = -1

    def new_key(self, place: NumbersPlace) -> int:
        self.places[len(self.places)] = place
        return len(self.places) - 1

    def add(self, where: Where, kind: Kind, dtype: Any, line: str, key: int) -> None:
        """Adds a value to the row of a path, a kind and a dtype."""
        row = where, kind, str(np.dtype(dtype))
        self.rows.setdefault(row, (line, {}))[1][key] = None

    def layout(self, step: TrainStep, notes: Mapping[int, Any]) -> SnapshotRows:
        """Returns the rows of the arrays `notes`, joined in the order of their keys."""
        every = [one[0] for one in (*self.operations, *self.rows) if not isinstance(one[0], str)]
        lost = lost_prefixes(every)

        def text(path: Where) -> str:
            return path if isinstance(path, str) else spelled(lost.get(path, path))

        found: dict[tuple[str, Kind, str], SnapshotRow] = {}
        with naming(every):
            operations = tuple((text(path), *rest) for path, *rest in self.operations)
            for (path, kind, dtype), (line, keys) in self.rows.items():
                if known := tuple(key for key in keys if key in notes):
                    row = SnapshotRow(text(path), kind, dtype, line, known)
                    before = found.setdefault(row[:3], row._replace(keys=()))
                    keys = tuple(dict.fromkeys((*before.keys, *known)))
                    found[row[:3]] = before._replace(keys=keys)
        params = {param.leaf for param in step.params}
        kinds = (
            "param" if i in params else "state" if i in step.carried else "input"
            for i in range(len(step.paths))
        )
        shapes = {key: tuple(notes[key].shape) for key in sorted(notes)}
        return SnapshotRows(
            tuple(sorted(found.values(), key=lambda row: KINDS.index(row.kind))),
            operations,
            tuple((key, self.places[key]._replace(shape=shapes[key])) for key in shapes),
            tuple(key for key in self.firsts if key in notes),
            self.entered,
            tuple(zip(step.paths, kinds, strict=True)),
            tuple(step.flags.values()),
        )

"""Measurements in the program of a step, and the rows that records have of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from policy.inspect.monitor.nonfinite import StepOperation
from policy.inspect.monitor.snapshot import KINDS, Kind, NumbersPlace, SnapshotRow, SnapshotRows
from policy.inspect.monitor.step import TrainStep
from policy.inspect.traced.module_values import ModuleValue
from policy.inspect.traced.placed import ModulePass
from policy.programs.module_paths import lost_prefixes
from policy.programs.paths import Path, naming, spelled


@dataclasses.dataclass
class StepLog:
    """The values that were measured.

    Attributes:
      places: those of the numbers, by their keys.
      values: those that leave modules, in program order.
      leaves: the keys and dtypes of arrays of a leaf, of a kind.
      operations: those that may make infinities, in program order.
      firsts: the keys of the first of them in each program inside the step.
      entered: the key of the codes of the step's arguments.
    """

    places: dict[int, NumbersPlace] = dataclasses.field(default_factory=dict)
    values: list[ModuleValue] = dataclasses.field(default_factory=list)
    leaves: dict[tuple[Kind, int], tuple[int, Any]] = dataclasses.field(default_factory=dict)
    operations: list[tuple[ModulePass | str, str, str, str]] = dataclasses.field(
        default_factory=list
    )
    firsts: list[int] = dataclasses.field(default_factory=list)
    entered: int = -1

    def new_key(self, place: NumbersPlace) -> int:
        self.places[len(self.places)] = place
        return len(self.places) - 1

    def layout(self, step: TrainStep, notes: Mapping[int, Any]) -> SnapshotRows:
        """Returns the rows of the arrays `notes`, joined in the order of their keys."""
        made = [place for place, *_ in self.operations if isinstance(place, ModulePass)]
        every = [place.path for place in (*made, *(one for v in self.values for one in v.left))]
        lost = lost_prefixes(every)

        def text(path: Path) -> str:
            return spelled(lost.get(path, path))

        with naming(every):
            rows = self._rows(step, notes, text)
            operations = tuple(
                StepOperation(made, "update", *rest)
                if isinstance(made, str)
                else StepOperation(text(made.path), made.direction, *rest)
                for made, *rest in self.operations
            )
        params = {param.leaf for param in step.params}
        kinds = (
            "param" if i in params else "state" if i in step.carried else "input"
            for i in range(len(step.paths))
        )
        return SnapshotRows(
            tuple(sorted(rows, key=lambda row: KINDS.index(row.kind))),
            operations,
            tuple(
                (key, dataclasses.replace(self.places[key], shape=tuple(notes[key].shape)))
                for key in sorted(notes)
            ),
            tuple(key for key in self.firsts if key in notes),
            self.entered,
            tuple(zip(step.paths, kinds, strict=True)),
            tuple(step.flags.values()),
        )

    def _rows(
        self, step: TrainStep, notes: Mapping[int, Any], text: Callable[[Path], str]
    ) -> list[SnapshotRow]:
        """Returns the rows of values, one for each path, kind and dtype, and those of arrays."""
        found: dict[tuple[str, Kind, str], tuple[str, dict[int, None]]] = {}
        for value in (value for value in self.values if value.key in notes):
            line = value.source.partition(" (")[0]
            for place in value.left:
                row = text(place.path), row_kind(value.made), str(np.dtype(value.dtype))
                found.setdefault(row, (line, {}))[1][value.key] = None
        for (kind, leaf), (key, dtype) in self.leaves.items():
            if key in notes:
                found[step.paths[leaf], kind, str(np.dtype(dtype))] = "", {key: None}
        return [SnapshotRow(*row, line, tuple(keys)) for row, (line, keys) in found.items()]


def row_kind(made: ModulePass) -> Kind:
    return "cotangent" if made.direction == "backward" else "activation"

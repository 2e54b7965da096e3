"""Measurements in the program of a step, and the rows that records have of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from policy.inspect.monitor.nonfinite import FirstSpan, StepOperation
from policy.inspect.monitor.snapshot import KINDS, Kind, SnapshotRow, SnapshotRows, Span
from policy.inspect.monitor.step import TrainStep
from policy.inspect.traced.module_values import ModuleValue
from policy.inspect.traced.placed import ModulePass
from policy.programs.module_paths import lost_prefixes
from policy.programs.paths import Path, naming, spelled


class NumbersPlace(NamedTuple):
    """The place of some numbers in a program.

    Attributes:
      is_layers: for each scan around it, whether its steps are layers.
      is_reverse: for each, whether it runs from the last step to the first.
      size: elements of the value that they are of, on all devices.
      examples: the length of its first axis if that is the batch's, else 0.
    """

    is_layers: tuple[bool, ...]
    is_reverse: tuple[bool, ...]
    size: int = 0
    examples: int = 0


@dataclasses.dataclass
class StepLog:
    """The values that were measured.

    Attributes:
      places: those of the numbers, by their keys.
      values: those that leave modules, in program order.
      leaves: the keys and dtypes of arrays of a leaf, of a kind.
      codes: the keys, paths and dtypes of codes of 8 bits.
      operations: those that may make infinities, in program order.
      firsts: the keys of the first of them in each program inside the step.
      entered: the key of the codes of the step's arguments.
    """

    places: dict[int, NumbersPlace] = dataclasses.field(default_factory=dict)
    values: list[ModuleValue] = dataclasses.field(default_factory=list)
    leaves: dict[tuple[Kind, int], tuple[int, Any]] = dataclasses.field(default_factory=dict)
    codes: dict[int, tuple[Path, str, str]] = dataclasses.field(default_factory=dict)
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
        starts, start = {}, 0
        for key in sorted(notes):
            starts[key] = start
            start += int(notes[key].size)
        spans = {
            key: Span(
                starts[key],
                note.shape[-1],
                tuple(note.shape[:-1]),
                self.places[key].is_layers,
                self.places[key].size,
                self.places[key].examples,
            )
            for key, note in notes.items()
        }
        places = [place for value in self.values for place in value.left]
        places += [made for made, *_ in self.operations if isinstance(made, ModulePass)]
        lost = lost_prefixes(place.path for place in places)

        def text(path: Path) -> str:
            return spelled(lost.get(path, path))

        with naming(place.path for place in places):
            rows = self._rows(step, spans, text)
            operations = tuple(
                StepOperation(made, "update", *rest)
                if isinstance(made, str)
                else StepOperation(text(made.path), made.direction, *rest)
                for made, *rest in self.operations
            )
        ordered = sorted(rows.items(), key=lambda item: KINDS.index(item[0][1]))
        firsts = (
            FirstSpan(span.start, span.steps, span.is_layers, reverse, span.width)
            for span, reverse in (
                (spans[key], self.places[key].is_reverse) for key in self.firsts if key in spans
            )
        )
        return SnapshotRows(
            tuple(
                SnapshotRow(path, kind, dtype, line, tuple(of))
                for (path, kind, dtype), (line, of) in ordered
            ),
            operations,
            tuple(firsts),
            spans[self.entered],
            step.paths,
            tuple(str(array.dtype) for array in step.arrays),
        )

    def _rows(self, step: TrainStep, spans: Mapping[int, Span], text: Any) -> dict[Any, Any]:
        """Returns lines and spans of rows, by path, kind and dtype."""
        rows: dict[tuple[str, Kind, str], tuple[str, dict[Span, None]]] = {}
        for value in (value for value in self.values if value.key in spans):
            line = value.source.partition(" (")[0]
            for place in value.left:
                row = text(place.path), row_kind(value.made), str(np.dtype(value.dtype))
                rows.setdefault(row, (line, {}))[1][spans[value.key]] = None
        for (kind, leaf), (key, dtype) in self.leaves.items():
            if key in spans:
                rows[step.paths[leaf], kind, str(np.dtype(dtype))] = "", {spans[key]: None}
        for key, (path, operand, dtype) in self.codes.items():
            if key in spans:
                row = f"{text(path)}/{operand}", "codes", dtype
                rows.setdefault(row, ("", {}))[1][spans[key]] = None
        return rows


def row_kind(made: ModulePass) -> Kind:
    return "cotangent" if made.direction == "backward" else "activation"

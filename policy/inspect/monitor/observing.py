"""Evaluates the program of a step once more, and measures values that leave its modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from policy.inspect.monitor.keep import Keep
from policy.inspect.monitor.snapshot import KINDS, Kind, SnapshotRow, SnapshotRows, Span
from policy.inspect.monitor.step import TrainStep
from policy.inspect.monitor.tensor_statistics import statistics_of
from policy.inspect.monitor.updates import ArrayRead, is_lost, reads_of
from policy.inspect.traced.module_values import (
    ModuleValue,
    ModuleValueInterpreter,
    ValueOrigin,
    passes,
    places_around,
)
from policy.programs.jaxprs import Equation, OpenJaxpr, bind, equations_within, opened, programs_of
from policy.programs.paths import naming, spelled
from policy.programs.primitives import HOST, INLINED
from policy.programs.reading.matmul_operands import CastPlace
from policy.programs.reading.walk import source_of
from policy.programs.rewriting.interpreter import CONTROL_FLOW
from policy.programs.rewriting.upcast import ModulePass, PlacedValue, dtype_of, lost_prefixes


class NumbersPlace(NamedTuple):
    """The place of a measured value's numbers.

    Attributes:
      size: elements of the value, on all devices.
      is_layers: for each scan around it, whether its steps are layers.
    """

    size: int
    is_layers: tuple[bool, ...]


@dataclasses.dataclass
class StepLog:
    """The values that were measured.

    Attributes:
      values: those that leave modules, in program order.
      shapes: the place of the numbers of each key.
      keys: the key of each array of a leaf, of a kind.
      dtypes: of those arrays.
    """

    values: list[ModuleValue] = dataclasses.field(default_factory=list)
    shapes: dict[int, NumbersPlace] = dataclasses.field(default_factory=dict)
    keys: dict[tuple[Kind, int], int] = dataclasses.field(default_factory=dict)
    dtypes: dict[tuple[Kind, int], Any] = dataclasses.field(default_factory=dict)

    def new_key(self) -> int:
        return len(self.values) + len(self.keys)

    def layout(self, step: TrainStep, notes: Mapping[int, Any]) -> SnapshotRows:
        """Returns the rows of the arrays `notes`, joined in the order of their keys."""
        spans, start = {}, 0
        for key in sorted(notes):
            *steps, width = notes[key].shape
            size, is_layers = self.shapes[key]
            spans[key] = Span(start, width, tuple(steps), is_layers, size)
            start += notes[key].size
        rows: dict[tuple[str, Kind, str], tuple[str, dict[Span, None]]] = {}
        measured = [value for value in self.values if value.key in spans]
        lost = lost_prefixes(place.path for value in measured for place in value.left)
        with naming(place.path for value in measured for place in value.left):
            for value in measured:
                kind = _kind_of(value.made)
                for place in value.left:
                    path = spelled(lost.get(place.path, place.path))
                    row = path, kind, str(np.dtype(value.dtype))
                    line = value.source.partition(" (")[0]
                    rows.setdefault(row, (line, {}))[1][spans[value.key]] = None
        for (kind, leaf), key in self.keys.items():
            if key in spans:
                dtype = str(np.dtype(self.dtypes[kind, leaf]))
                rows[step.paths[leaf], kind, dtype] = "", {spans[key]: None}
        ordered = sorted(rows.items(), key=lambda item: KINDS.index(item[0][1]))
        return SnapshotRows(
            tuple(SnapshotRow(*row, line, tuple(of)) for row, (line, of) in ordered)
        )


def _kind_of(made: ModulePass) -> Kind:
    return "cotangent" if made.direction == "backward" else "activation"


def observed(step: TrainStep, log: StepLog, keep: Keep) -> Callable[..., dict[int, Any]]:
    """Returns the function of a step's arrays that measures them, and the values in the step."""
    body, consts = opened(step.jaxpr)
    params = {param.leaf for param in step.params}
    reads = reads_of(step.jaxpr, step.params)

    def run(*arrays: Any) -> dict[int, Any]:
        observer = Observer(log, reads, keep, step.paths)
        for i, array in enumerate(arrays):
            kind: Kind = "param" if i in params else "input"
            if (i in params or i not in step.carried) and is_measured(array.dtype):
                observer.measure_leaf(kind, i, array)
        given = [[PlacedValue([array]) for array in each] for each in (consts, arrays)]
        outputs = observer.run(body, *given)
        observer.returned(outputs, body.outvars)
        return observer.notes

    return run


class Observer(ModuleValueInterpreter):
    """Evaluates a program, and measures values that leave modules, gradients and updates.

    Args:
      log: the record to write.
      reads: gradients and updates by the equation that reads them.
      keep: the choice of what is measured.
      paths: of the arrays of the step.
    """

    def __init__(
        self,
        log: StepLog,
        reads: Mapping[CastPlace, Sequence[ArrayRead]],
        keep: Keep,
        paths: Sequence[str],
    ) -> None:
        super().__init__()
        self.log, self.reads, self.keep, self.paths = log, reads, keep, paths
        self.is_layers: tuple[bool, ...] = ()
        self.devices = 1

    def inside(self, equation: Equation) -> Self:
        inner = super().inside(equation)
        if equation.primitive.name == "scan":
            inner.is_layers = (*self.is_layers, not _differentiates(equation))
        for axis in inner.axes[len(self.axes) :]:
            inner.devices *= int(dict(equation.params["mesh"].shape)[axis])
        return inner

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        name = equation.primitive.name
        if name in HOST and (equation.effects or not equation.outvars):
            return _without_effects(equation)
        place = self.place_of(equation)
        if name not in INLINED:
            for value, atom in zip(values, equation.invars, strict=True):
                self._read(value, place, dtype_of(atom))
        if name in CONTROL_FLOW:
            return CONTROL_FLOW[name](self, equation, values)
        arrays = [value.arrays[0] for value in values]
        outputs = bind(equation, arrays)
        for read in self.reads.get((self.chain, id(equation)), ()):
            self._measure_read(read, arrays, outputs)
        origin = ValueOrigin(place, *self.made_by(equation, place, values))
        return [PlacedValue([output], dataclasses.replace(origin)) for output in outputs]

    # Measurements ---------------------------------------------------------------------------------

    def _read(self, value: PlacedValue, reader: ModulePass, dtype: Any) -> None:
        if passes(value, reader):
            self._leaves(value, places_around(value.origin.place, reader.path), dtype)

    def _leaves(self, value: PlacedValue, left: Mapping[ModulePass, None], dtype: Any) -> None:
        """Measures a value that leaves modules for the first time."""
        origin, (array,) = value.origin, value.arrays
        kind = _kind_of(origin.place)
        if not is_measured(dtype):
            return
        kept = {place: None for place in left if self.keep(place.path, kind)}
        if not kept:
            return
        if origin.measurement is None:
            origin.measurement = ModuleValue(
                self.log.new_key(), origin.primitive, origin.source, dtype, origin.place
            )
            self.log.values.append(origin.measurement)
            self._note(origin.measurement.key, array)
        origin.measurement.left.update(kept)

    def _note(self, key: int, array: Any, lost: Any = None) -> None:
        parts = 2 if jnp.issubdtype(array.dtype, jnp.complexfloating) else 1
        self.log.shapes[key] = NumbersPlace(parts * array.size * self.devices, self.is_layers)
        self.notes[key] = statistics_of(array, self.axes, lost)

    def measure_leaf(self, kind: Kind, leaf: int, array: Any, lost: Any = None) -> None:
        """Measures an array of a leaf of the arguments."""
        which = kind, leaf
        if not self.keep.of_leaf(self.paths[leaf], kind):
            return
        if which not in self.log.keys:
            self.log.keys[which] = self.log.new_key()
        self.log.dtypes[which] = array.dtype
        self._note(self.log.keys[which], array, lost)

    def _measure_read(self, read: ArrayRead, arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
        array, lost = arrays[read.operand], None
        if read.kind == "update":
            array = jnp.broadcast_to(array, outputs[0].shape)
            lost = is_lost(read, arrays[1 - read.operand], outputs[0], array)
        self.measure_leaf(read.kind, read.leaf, array, lost)

    def returned(self, values: Sequence[PlacedValue], atoms: Sequence[Any]) -> None:
        """Measures the outputs of the program, which leave every path."""
        for value, atom in zip(values, atoms, strict=True):
            if value.origin is not None:
                self._leaves(value, places_around(value.origin.place, ()), dtype_of(atom))

    # Bodies ---------------------------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        place = self.place_of(equation)
        origin = ValueOrigin(place, *self.made_by(equation, place, values))
        return [PlacedValue([None], dataclasses.replace(origin)) for _ in equation.outvars]

    def body(
        self, jaxpr: OpenJaxpr, consts: Sequence[PlacedValue], args: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        """Runs a body, whose measurements are known only inside it."""
        args = [
            PlacedValue(arg.arrays, arg.origin and dataclasses.replace(arg.origin)) for arg in args
        ]
        outputs = super().body(jaxpr, consts, args)
        for value, atom in zip(outputs, jaxpr.outvars, strict=True):
            self._read(value, self.place, dtype_of(atom))
        return outputs


def is_measured(dtype: Any) -> bool:
    """Returns whether arrays of a dtype have statistics: floating and complex ones."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def _without_effects(equation: Equation) -> list[PlacedValue]:
    """Returns the results of a callback that is left out; none, or some that nothing reads."""
    if any(type(variable).__name__ != "DropVar" for variable in equation.outvars):
        raise ValueError(
            f"monitor evaluates the step once more, and can't call the {equation.primitive.name} "
            f"at {source_of(equation)} again, whose result the step reads. Use jax.pure_callback "
            "if it has no side effects, or call it outside of the step."
        )
    return [PlacedValue([jnp.zeros(v.aval.shape, v.aval.dtype)]) for v in equation.outvars]


def _differentiates(equation: Equation) -> bool:
    """Returns whether a scan's steps run forward and backward each, as those of microbatches."""
    if "transpose(" in str(equation.source_info.name_stack):
        return False
    inner = (each for one in programs_of(equation) for each in equations_within(one))
    return any("transpose(" in str(each.source_info.name_stack) for each in inner)

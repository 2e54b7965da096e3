"""A run of a program that keeps the values that pass between its modules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from policy.inspect.compare.dual_interpreter import Log, Measurement, Measuring
from policy.inspect.compare.statistics import has_nan, is_measurable
from policy.inspect.traced.call import Program
from policy.inspect.traced.module_values import ValueOrigin, places_around
from policy.programs.jaxprs import Equation, bind, live_part, opened, scan_arity
from policy.programs.paths import divided, once
from policy.programs.primitives import INLINED, NOT_STACKED
from policy.programs.rewriting.interpreter import CONTROL_FLOW, is_for_platforms
from policy.programs.rewriting.upcast import (
    Device,
    ModulePass,
    PlacedValue,
    dtype_of,
    in_passes,
    is_in_passes,
)


@dataclasses.dataclass(eq=False)
class NotedValue(Measurement):
    """A value that is kept.

    Attributes:
      order: its place among all values of the program, as they are computed.
      rank: the number of its axes in its body.
    """

    order: int = 0
    rank: int = 0


@dataclasses.dataclass(eq=False)
class _Origin(ValueOrigin):
    order: int = 0


class Recorder(Measuring):
    """Runs one program, and notes the values that pass between its modules as they are.

    A cast between floats returns the value that it casts, in another dtype; that of an argument is
    an argument. Programs inside `while` and `shard_map` run as they are.

    Args:
      log: the record to write.
      device: float32 matmuls are multiplied as this device does; None multiplies float32.
    """

    def __init__(self, log: Log, device: Device | None = None):
        super().__init__()
        self.log = log
        self.device: Device | None = device
        self._numbering = itertools.count(1)
        self._rows = 0  # of the enclosing scan

    # Equations ------------------------------------------------------------------------------------

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        place, name = self.place_of(equation), equation.primitive.name
        if place.direction != "again":
            self.log.places.setdefault(place)
        if name not in INLINED:
            for value, atom in zip(values, equation.invars, strict=True):
                self._read(value, place, dtype_of(atom))
        if name in CONTROL_FLOW and name not in NOT_STACKED and not is_for_platforms(equation):
            self._rows = len(values) - sum(scan_arity(equation)) if name == "scan" else 0
            return self._numbered(CONTROL_FLOW[name](self, equation, values))
        arrays = [value.arrays[0] for value in values]
        if self.device is not None and is_in_passes(equation):
            outputs = in_passes(equation, arrays, self.device)
        else:
            outputs = bind(equation, arrays)
        dtypes = [dtype_of(atom) for atom in (*equation.invars, *equation.outvars)]
        if name == "convert_element_type" and all(map(is_float, dtypes)):
            return [PlacedValue(outputs, values[0].origin)]
        made = self.made_by(equation, place, values)
        return self._numbered([PlacedValue([one], _Origin(place, *made)) for one in outputs])

    def _numbered(self, values: list[PlacedValue]) -> list[PlacedValue]:
        for value in values:
            if value.origin is not None and not value.origin.order:
                value.origin.order = next(self._numbering)
        return values

    # Notes ----------------------------------------------------------------------------------------

    def _measured(self, value: PlacedValue, origin: _Origin, dtype: DTypeLike) -> NotedValue:
        origin.measurement = self._noted(value, origin, dtype)
        return origin.measurement

    def _noted(self, value: PlacedValue, origin: _Origin, dtype: DTypeLike) -> NotedValue:
        key, (array,) = len(self.log.measurements), value.arrays
        one = NotedValue(key, origin.primitive, origin.source, dtype, origin.place, self.bodies)
        one.order, one.rank = origin.order, array.ndim
        self.log.measurements.append(one)
        self.notes[key] = array
        return one

    def returned(self, values: Sequence[PlacedValue], atoms: Sequence[Any]) -> None:
        """Notes each output as it is returned, after its casts, beside what leaves its module."""
        for i, (value, dtype) in enumerate(zip(values, map(dtype_of, atoms), strict=True)):
            if not is_measurable(dtype):
                continue
            origin = value.origin or _Origin(ModulePass())
            is_of_module = bool(origin.place.path) and origin.place.direction == "forward"
            if is_of_module:
                self._read(value, ModulePass(), dtype)
            one = self._noted(value, origin, dtype)
            one.output = i
            if value.origin is not None and not is_of_module:
                one.returned.update(places_around(origin.place, ()) or {origin.place: None})

    # Bodies ---------------------------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        place = self.place_of(equation)
        made = self.made_by(equation, place, values)
        return [PlacedValue([None], _Origin(place, *made)) for _ in equation.outvars]

    def entering(self, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        """Returns values inside of a loop; rows of an argument, such as weights, stay one."""
        carried = len(values) - self._rows
        return [
            value
            if i >= carried and value.origin is None
            else PlacedValue(value.arrays, _Origin(self.place))
            for i, value in enumerate(values)
        ]


def is_float(dtype: DTypeLike) -> bool:
    """Returns whether a dtype holds real floats."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


class Recording:
    """The values that pass between the modules of a program that was run.

    Attributes:
      log: its places and values.
      notes: the values by their keys, with an axis for each enclosing scan before their own.
      inputs_with_nan: the names of the inputs that contain NaN.
      values: the values in the order of their computation.
      outputs: the outputs among them, by their index.
      places: the modules that they leave, in program order.
    """

    def __init__(self, program: Program, device: Device | None):
        # without what no output needs, such as a call that only makes a cache
        program = dataclasses.replace(program, jaxpr=live_part(program.jaxpr))
        self.log, arrays = Log(), program.arguments.arrays

        def run(*arrays: Any) -> tuple[dict[int, Any], list[Any]]:
            recorder = Recorder(self.log, device)
            body, consts = opened(program.jaxpr)
            given = [[PlacedValue([array]) for array in each] for each in (consts, arrays)]
            recorder.returned(recorder.run(body, *given), body.outvars)
            return recorder.notes, [has_nan(array) for array in arrays]

        self.notes, has_nans = program.compiled(run)(*arrays)
        names = program.arguments.names()
        self.inputs_with_nan = list(itertools.compress(names, jax.device_get(has_nans)))
        found: list[Any] = [one for one in self.log.measurements if one.key in self.notes]
        self.values = sorted(found, key=lambda one: one.order)
        self.outputs = {one.output: one for one in found if one.output is not None}
        self.places = {place: None for one in found for place in places_left_by(one) if place.path}
        models = [divided(place.path) for place in self.log.places]
        self._has_one_model = len({model[0] for model in models if model}) == 1

    def name_of(self, place: ModulePass) -> ModulePass:
        """Returns a place as the other program may name it: its only model may be of any class."""
        found = divided(place.path) if self._has_one_model else None
        return place if found is None else place._replace(path=once(found[1]) or (":",))

    def left(self, one: Measurement) -> dict[ModulePass, None]:
        """Returns the names of the modules that a value leaves."""
        return {self.name_of(place): None for place in places_left_by(one)}


def places_left_by(one: Measurement) -> dict[ModulePass, None]:
    """Returns the modules that a value leaves."""
    return one.left | one.returned

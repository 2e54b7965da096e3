"""A run of a program that keeps the values that pass between its modules."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.inspect.compare.statistics import (
    NAMES,
    has_nan,
    is_float,
    is_measurable,
    limit_of,
    shares_of_codes,
)
from policy.inspect.traced.call import Program
from policy.inspect.traced.matmul_operands import LIMITS_CODES, QuantizedOperand
from policy.inspect.traced.module_values import (
    ModuleValueInterpreter,
    ValueOrigin,
    passes,
    places_around,
    unlimited,
)
from policy.inspect.traced.passes import Device, in_passes, is_in_passes
from policy.inspect.traced.placed import ModulePass, PlacedValue
from policy.inspect.traced.program_facts import live_part
from policy.inspect.traced.upcast import Upcast, dtype_of, widen
from policy.programs.jaxprs import Equation, OpenJaxpr, bind, opened, scan_arity
from policy.programs.paths import divided, once
from policy.programs.primitives import INLINED
from policy.programs.rewriting.interpreter import CONTROL_FLOW, handler_of, manual_axes

Dtypes = Literal["as written", "float32"]


@dataclasses.dataclass(eq=False)
class Measurement:
    """A value that is read in another module than the one that computed it, and is kept.

    Attributes:
      key: the key of its numbers among the notes of a run; keys increase in program order.
      primitive, source: the operation that computed it, and its source line.
      dtype: its dtype in the program.
      made: the place that computed it.
      bodies: the enclosing programs, outermost first.
      left: the paths that it leaves: it was computed inside them and is read outside.
      entered: the paths that it enters: it was computed outside them and is read inside.
      output: its index among the outputs of the program, or None.
      returned: the paths that it leaves as an output.
      order: its position among all values of the program, as they are computed.
      rank: the number of its axes in its body.
      branches: the keys of the indices that choose the branches around it.
      numbers: after the run, (..., len(NAMES)), with an axis for each enclosing scan.
    """

    key: int
    primitive: str
    source: str
    dtype: DTypeLike
    made: ModulePass
    bodies: tuple[Any, ...] = ()
    left: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    entered: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    output: int | None = None
    returned: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    order: int = 0
    rank: int = 0
    branches: tuple[int, ...] = ()
    numbers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(NAMES)))

    @property
    def errors(self) -> np.ndarray:
        """The errors in the steps of the scans."""
        return self.numbers[..., NAMES.index("error")]

    @property
    def worst(self) -> np.ndarray:
        """The worst of each number."""
        return self.numbers.reshape(-1, len(NAMES)).max(0)

    @property
    def headroom(self) -> float:
        """The largest magnitude as a share of the dtype's largest number."""
        return float(self.worst[NAMES.index("largest")]) / limit_of(self.dtype)


@dataclasses.dataclass(eq=False)
class _Origin(ValueOrigin):
    """The origin of a value.

    `is_inner` tells whether it is a code or a scale of a matmul in 8 bits, which is not measured.
    """

    order: int = 0
    is_inner: bool = False


@dataclasses.dataclass
class Log:
    """A record of a run: its places in program order, the values that it keeps, and 8-bit codes.

    A place is that of an equation; those around it are not listed. Codes are of an operand, and of
    a dtype; the key of the i-th ones' numbers is -1 - i. Of notes in a `shard_map`, `inner_scans`
    has the number of scans inside of it, by key.
    """

    places: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    codes: list[tuple[QuantizedOperand, DTypeLike]] = dataclasses.field(default_factory=list)
    inner_scans: dict[int, int] = dataclasses.field(default_factory=dict)
    keys: itertools.count[int] = dataclasses.field(default_factory=itertools.count)


class Recorder(ModuleValueInterpreter):
    """Runs a program, and notes the values that pass between its modules as they are.

    Programs inside `while` run as they are, and so do those of a `shard_map` in another one.

    Args:
      log: the record to write.
      program: the program to run.
      dtypes: the program's own, or "float32" for all half dtypes.
      follows_casts: whether a cast between floats returns the value that it casts, in another
        dtype; that of an argument is an argument.
      device: float32 matmuls of the program are multiplied as this device does; None multiplies
        float32.
    """

    origin_type = _Origin

    def __init__(
        self,
        log: Log,
        program: Program,
        dtypes: Dtypes = "as written",
        follows_casts: bool = False,
        device: Device | None = None,
    ):
        reference = program.reference
        if dtypes == "as written":
            reference = dataclasses.replace(reference, constants={})
        super().__init__(reference)
        self.log, self.codes = log, program.codes
        self.device: Device | None = device
        self.is_wide, self.follows_casts = dtypes == "float32", follows_casts
        self.branches: tuple[int, ...] = ()
        self._numbering = itertools.count(1)
        self._rows = 0  # of the enclosing scan
        self._scans = 0  # inside of the enclosing shard_map
        self._is_sharded = False  # directly in a shard_map

    def inside(self, equation: Equation) -> Self:
        inner, name = super().inside(equation), equation.primitive.name
        inner._is_sharded = name == "shard_map"
        inner._scans = 0 if inner._is_sharded else self._scans + (name == "scan")
        return inner

    def note_spec(self, equation: Equation) -> PartitionSpec:
        return PartitionSpec(manual_axes(equation))

    # Equations ------------------------------------------------------------------------------------

    def step(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if not self.is_wide and id(equation) in self.reference.exact:  # XLA reads the rounding
            outputs = bind(equation, [value.arrays[0] for value in values])
            return [PlacedValue(outputs, values[0].origin)]
        return super().step(equation, values)

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        place, name = self.place_of(equation), equation.primitive.name
        if place.direction != "again":
            self.log.places.setdefault(place)
        if name not in INLINED:
            for value, atom in zip(values, equation.invars, strict=True):
                self._read(value, place, dtype_of(atom))
        is_whole = name == "while" or (name == "shard_map" and self.axes)
        if not is_whole and handler_of(equation) is not None:
            return self._numbered(self._control_flow(equation, values))
        outputs = self._evaluated(equation, values)
        at = self.chain, id(equation)
        if at in self.codes.operands and not self.is_wide and place.direction != "again":
            codes = shares_of_codes(outputs[0], unlimited(values[0]).arrays[0])
            self._note(codes, -1 - len(self.log.codes))
            self.log.codes.append((self.codes.operands[at], outputs[0].dtype))
        dtypes = [dtype_of(atom) for atom in (*equation.invars, *equation.outvars)]
        if self.follows_casts and name == "convert_element_type" and all(map(is_float, dtypes)):
            return [PlacedValue(outputs, values[0].origin)]
        origins = [_Origin(place, *self.made_by(equation, place, values)) for _ in outputs]
        for i, origin in enumerate(origins):
            origin.is_inner = at in self.codes.inner
            origin.made = (equation, values, i) if name in LIMITS_CODES else None
        pairs = zip(outputs, origins, strict=True)
        return self._numbered([PlacedValue([output], origin) for output, origin in pairs])

    def _control_flow(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        name, run = equation.primitive.name, self
        if name == "cond":
            run = copy.copy(self)
            run.branches = (*self.branches, self._note(values[0].arrays[0]))
        self._rows = len(values) - sum(scan_arity(equation)) if name == "scan" else 0
        return CONTROL_FLOW[name](run, equation, values)

    def _evaluated(self, equation: Equation, values: list[PlacedValue]) -> Sequence[Any]:
        arrays = [value.arrays[0] for value in values]
        if self.is_wide:
            upcast = Upcast(self.codes.roundings).standing_in(self)
            given = [PlacedValue([widen(array)]) for array in arrays]
            return [value.arrays[0] for value in upcast.equation(equation, given)]
        if self.device is not None and is_in_passes(equation):
            return in_passes(equation, arrays, self.device)
        return bind(equation, arrays)

    def _numbered(self, values: list[PlacedValue]) -> list[PlacedValue]:
        for value in values:
            if value.origin is not None and not value.origin.order:
                value.origin.order = next(self._numbering)
        return values

    # Notes ----------------------------------------------------------------------------------------

    def _read(self, value: PlacedValue, reader: ModulePass, dtype: DTypeLike) -> None:
        """Notes the modules between the one that computed a value and its reader."""
        origin = value.origin
        if not passes(value, reader) or not is_measurable(dtype) or origin.is_inner:
            return
        if origin.measurement is None:
            origin.measurement = self._noted(value, origin, dtype)
        origin.measurement.left.update(places_around(origin.place, reader.path))
        origin.measurement.entered.update(places_around(reader, origin.place.path))

    def _noted(self, value: PlacedValue, origin: _Origin, dtype: DTypeLike) -> Measurement:
        key, rank = self._note(value.arrays[0]), value.arrays[0].ndim
        one = Measurement(key, origin.primitive, origin.source, dtype, origin.place, self.bodies)
        one.order, one.rank, one.branches = origin.order, rank, self.branches
        self.log.measurements.append(one)
        return one

    def _note(self, array: Any, key: int | None = None) -> int:
        """Notes an array, with an axis for the devices of a `shard_map`, and returns its key."""
        key = next(self.log.keys) if key is None else key
        self.notes[key] = array[None] if self.axes else array
        if self.axes:
            self.log.inner_scans[key] = self._scans
        return key

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

    def body(
        self, jaxpr: OpenJaxpr, consts: Sequence[PlacedValue], args: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        """Runs a body, whose values are noted only inside it."""
        origins = [arg.origin and dataclasses.replace(arg.origin, made=None) for arg in args]
        args = [PlacedValue(arg.arrays, o) for arg, o in zip(args, origins, strict=True)]
        outputs = super().body(jaxpr, consts, args)
        for value, atom in zip(outputs, jaxpr.outvars, strict=True):
            self._read(value, self.place, dtype_of(atom))
        if self._is_sharded:  # the axis of devices comes first
            moved = {k: jnp.moveaxis(n, self.log.inner_scans[k], 0) for k, n in self.notes.items()}
            self.notes = moved
        return outputs

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        return PlacedValue([widen(value.arrays[0])], value.origin) if self.is_wide else value

    def entering(self, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        """Returns values inside of a loop; rows of an argument, such as weights, stay one."""
        carried = len(values) - self._rows
        return [
            value
            if i >= carried and value.origin is None
            else PlacedValue(value.arrays, _Origin(self._place_inside(value)))
            for i, value in enumerate(values)
        ]

    def _place_inside(self, value: PlacedValue) -> ModulePass:
        if value.origin is None:
            return self.place
        return value.origin.place._replace(path=self.place.path)


def recorded(
    log: Log,
    program: Program,
    dtypes: Dtypes = "as written",
    follows_casts: bool = False,
    device: Device | None = None,
) -> Callable[..., tuple[dict[int, Any], list[Any]]]:
    """Returns the function of a program's arrays that runs it with a `Recorder`.

    It returns the notes, and for each array whether it contains NaN.
    """

    def run(*arrays: Any) -> tuple[dict[int, Any], list[Any]]:
        recorder = Recorder(log, program, dtypes, follows_casts, device)
        body, consts = opened(program.jaxpr)
        read = widen if dtypes == "float32" else lambda array: array
        given = [[PlacedValue([read(array)]) for array in each] for each in (consts, arrays)]
        recorder.returned(recorder.run(body, *given), body.outvars)
        return recorder.notes, [has_nan(array) for array in arrays]

    return run


class Recording:
    """The values that pass between the modules of a program that was run.

    Attributes:
      program: the program.
      log: its places and values.
      notes: the values by their keys, with an axis for each enclosing scan before their own.
      inputs_with_nan: the names of the inputs that contain NaN.
      values: the values in the order of their computation.
      outputs: the outputs among them, by their index.
      places: the modules that they leave, in program order.
    """

    def __init__(
        self,
        program: Program,
        device: Device | None,
        dtypes: Dtypes = "as written",
        follows_casts: bool = False,
    ):
        if follows_casts:  # without what no output needs, such as a call that only makes a cache
            program = dataclasses.replace(program, jaxpr=live_part(program.jaxpr))
        self.program, self.log = program, Log()
        run = recorded(self.log, program, dtypes, follows_casts, device)
        self.notes, has_nans = jax.jit(run)(*program.arguments.arrays)
        names = program.arguments.names()
        self.inputs_with_nan = list(itertools.compress(names, jax.device_get(has_nans)))
        found = [one for one in self.log.measurements if one.key in self.notes]
        self.values = sorted(found, key=lambda one: one.order)
        self.outputs = {one.output: one for one in found if one.output is not None}
        self.places = {place: None for one in found for place in places_left_by(one) if place.path}
        models = [divided(place.path) for place in self.log.places]
        self._has_one_model = len({model[0] for model in models if model}) == 1

    def array(self, one: Measurement) -> Any:
        """Returns a value, with axes for the scans, and then one for the devices of `shard_map`."""
        array, inner = self.notes[one.key], self.log.inner_scans.get(one.key)
        last = array.ndim - one.rank - 1
        return array if inner is None else jnp.moveaxis(array, last - inner, last)

    def scans(self, one: Measurement) -> int:
        """Returns the number of scans around a value."""
        return self.notes[one.key].ndim - one.rank - (one.key in self.log.inner_scans)

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

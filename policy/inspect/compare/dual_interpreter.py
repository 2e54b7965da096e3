"""Runs a program and its float32 counterpart, and measures values that pass between modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.compare import statistics
from policy.inspect.compare.statistics import NAMES, is_measurable
from policy.inspect.traced.call import Program
from policy.inspect.traced.module_values import (
    ModuleValue,
    ModuleValueInterpreter,
    ValueOrigin,
    passes,
    places_around,
    unlimited,
)
from policy.programs.dtypes import F32
from policy.programs.jaxprs import Equation, OpenJaxpr, bind, opened, scan_arity
from policy.programs.primitives import CATEGORY_OF, INLINED, MATMULS
from policy.programs.reading.matmul_operands import QuantisedOperand
from policy.programs.reading.walk import walk
from policy.programs.rewriting.interpreter import CONTROL_FLOW
from policy.programs.rewriting.upcast import (
    Device,
    ModulePass,
    PlacedValue,
    Upcast,
    depends,
    dtype_of,
    in_passes,
    is_apart,
    is_half,
    is_in_passes,
    widen,
)

_LARGE = 1024  # elements
_ENCODED = (F32, np.dtype(jnp.bfloat16), np.dtype(jnp.float16))  # stacked by a scan as 16 bits
_IS_ZERO = np.uint16(0x7FC1)  # of a difference: a NaN that no arithmetic returns


@dataclasses.dataclass(eq=False)
class Measurement(ModuleValue):
    """A measured value.

    Attributes:
      output: its index among the outputs of the program, or None.
      returned: the paths that it leaves as an output.
      numbers: after the run, (..., len(NAMES)), with an axis for each enclosing scan.
    """

    output: int | None = None
    returned: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
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
        return float(self.worst[NAMES.index("largest")]) / statistics.limit_of(self.dtype)


@dataclasses.dataclass(eq=False)
class Origin(ValueOrigin):
    """The origin of a value. It notes what may be rematerialised.

    `coded` is the dtype of the first array, if that is encoded: see `_encoded`. `is_inner` tells
    whether it is a code or a scale of a matmul in 8 bits, which is not measured.
    """

    measurement: Measurement | None = None
    coded: Any = None
    is_inner: bool = False


@dataclasses.dataclass
class Log:
    """A record of a run: its places in program order, the measured values, and the 8-bit codes.

    A place is that of an equation; those around it are not listed. Codes are of an operand, and of
    a dtype; the key of the i-th ones' numbers is -1 - i.
    """

    places: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    codes: list[tuple[QuantisedOperand, DTypeLike]] = dataclasses.field(default_factory=list)


class Measuring(ModuleValueInterpreter):
    """An interpreter that measures values when they are first read in another module."""

    def _read(self, value: PlacedValue, reader: ModulePass, dtype: DTypeLike) -> None:
        """Notes the modules between the one that computed a value and its reader."""
        origin = value.origin
        if passes(value, reader) and is_measurable(dtype):
            one = origin.measurement or self._measured(value, origin, dtype)
            one.left.update(places_around(origin.place, reader.path))
            one.entered.update(places_around(reader, origin.place.path))

    def _measured(self, value: PlacedValue, origin: Any, dtype: DTypeLike) -> Measurement:
        """Measures a value, and records that in its origin."""
        raise NotImplementedError

    def body(
        self, jaxpr: OpenJaxpr, consts: Sequence[PlacedValue], args: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        """Runs a body, whose measurements are known only inside it."""
        origins = [arg.origin and dataclasses.replace(arg.origin, made=None) for arg in args]
        args = [PlacedValue(arg.arrays, o) for arg, o in zip(args, origins, strict=True)]
        outputs = super().body(jaxpr, consts, args)
        for value, atom in zip(outputs, jaxpr.outvars, strict=True):
            self._read(value, self.place, dtype_of(atom))
        return outputs


class Paired(Measuring):
    """Runs a program on values of one array or two.

    A value that does not depend on half precision is one array. Any other value is two: the
    program's own, and that of float32.

    Args:
      log: the record to write.
      program: the program to run.
      device: float32 matmuls are multiplied as this device does; None multiplies float32.
    """

    def __init__(self, log: Log, program: Program, device: Device | None = None):
        super().__init__(program.reference)
        self.log, self.codes = log, program.codes
        self.device: Device | None = device
        self.has_gradients = bool(program.gradients)
        sites = () if device is None else walk(opened(program.jaxpr)[0])
        self.passes = {id(site.equation) for site in sites if is_in_passes(site.equation)}
        self.apart = frozenset(self.reference.constants) | self.codes.ids | self.passes
        self.again: dict[int, tuple[PlacedValue, Any]] = {}

    def tracing(self, program: Any) -> Self:
        inner = super().tracing(program)
        inner.again = {}
        return inner

    # Equations ------------------------------------------------------------------------------------

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        place = self.place_of(equation)
        if place.direction != "again":
            self.log.places.setdefault(place)
        name = equation.primitive.name
        if name not in INLINED:
            stacked = sum(scan_arity(equation)) if name == "scan" else len(values)
            values = [*map(_decoded, values[:stacked]), *values[stacked:]]
            for value, atom in zip(values, equation.invars, strict=True):
                self._read(value, place, dtype_of(atom))
            if place.direction == "backward":
                values = [self._saved(value) for value in values]
        pairs = [len(value.arrays) > 1 for value in values]
        if name in CONTROL_FLOW and not is_apart(equation, pairs, self.apart):
            return CONTROL_FLOW[name](self, equation, values)
        arrays = [value.arrays[0] for value in values]
        if name == "convert_element_type" and values[0].origin is None and arrays[0].size >= _LARGE:
            arrays = [self._after(arrays[0])]
        device = self.device if id(equation) in self.passes else None
        outputs = bind(equation, arrays) if device is None else in_passes(equation, arrays, device)
        at = self.chain, id(equation)
        if at in self.codes.operands:
            self._quantised(self.codes.operands[at], place, values[0], outputs[0])
        lanes = [[output] for output in outputs]
        if device is not None or at in self.codes.roundings or any(depends(equation, pairs)):
            wide = Upcast(self.codes.roundings).standing_in(self)
            given = [PlacedValue([widen(value.arrays[-1])]) for value in values]
            references = wide.equation(equation, given)
            lanes = [[o, r.arrays[0]] for o, r in zip(outputs, references, strict=True)]
        name, source = self.made_by(equation, place, values)
        made = [(equation, values, i) if _is_cheap(equation) else None for i in range(len(lanes))]
        is_inner = at in self.codes.inner
        return [
            PlacedValue(lane, Origin(place, name, source, made=m, is_inner=is_inner))
            for lane, m in zip(lanes, made, strict=True)
        ]

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        return [
            PlacedValue([value.arrays[0], found[k]], value.origin) if k in found else value
            for k, value in enumerate(values)
        ]

    # Measurements ---------------------------------------------------------------------------------

    def _read(self, value: PlacedValue, reader: ModulePass, dtype: DTypeLike) -> None:
        is_same = statistics.is_discrete(dtype) and len(value.arrays) == 1  # in both programs
        if value.origin is not None and not (value.origin.is_inner or is_same):
            super()._read(_decoded(value), reader, dtype)

    def _measured(self, value: PlacedValue, origin: Any, dtype: DTypeLike) -> Measurement:
        key = len(self.log.measurements)
        measurement = origin.measurement = Measurement(
            key, origin.primitive, origin.source, dtype, origin.place, self.bodies
        )
        self.log.measurements.append(measurement)
        is_pair = len(value.arrays) > 1
        measure = statistics.measured if is_pair else statistics.largest_alone
        self.notes[key] = measure(*value.arrays, axes=self.axes)
        value.arrays = tuple(self._after(array) for array in value.arrays)
        return measurement

    def _after(self, array: Any) -> Any:
        """Returns `array`, to be computed after the last measurement.

        XLA may compute in any order, for example run one of the two programs as a whole and keep
        all of its values for the measurements. The result depends on the measurement, and XLA can't
        know that it is a copy of `array`: no error is -1.
        """
        last = next(reversed(self.notes.values()), None)
        if last is None or not last.size:
            return array
        return jnp.where(last.reshape(-1)[0] != -1, array, jnp.zeros((), array.dtype))

    # Codes ----------------------------------------------------------------------------------------

    def _quantised(
        self, of: QuantisedOperand, place: ModulePass, value: PlacedValue, codes: Any
    ) -> None:
        """Measures the codes of an operand of a matmul in 8 bits."""
        if place.direction == "again":
            return
        note = statistics.shares_of_codes(codes, unlimited(value).arrays[0])
        key = -1 - len(self.log.codes)
        self.notes[key] = lax.pmean(note, self.axes) if self.axes else note
        self.log.codes.append((of, codes.dtype))

    # The backward pass ----------------------------------------------------------------------------

    def _saved(self, value: PlacedValue) -> PlacedValue:
        """Returns a value of the forward pass to be read by the backward pass.

        Two programs would save twice as many residuals. Saves only half-precision values and the
        outputs of matmuls and modules of this program; everything else is rematerialised.
        """
        origin = value.origin
        if origin is None or origin.place.direction == "backward" or len(value.arrays) == 1:
            return value
        if value.arrays[0].size < _LARGE or origin.coded is not None:
            return value
        return PlacedValue([self._once_more(value), *value.arrays[1:]], origin)

    def _once_more(self, value: PlacedValue) -> Any:
        if id(value) not in self.again:
            self.again[id(value)] = value, self._recomputed(value)
        return self.again[id(value)][1]

    def _recomputed(self, value: PlacedValue) -> Any:
        origin, array = value.origin, value.arrays[0]
        if array.size < _LARGE:
            return array
        is_kept = origin is not None and origin.measurement is not None and is_half(array.dtype)
        if origin is None or origin.made is None or is_kept:
            return self._after(array)
        equation, operands, i = origin.made
        return bind(equation, [self._once_more(operand) for operand in operands])[i]

    def returned(self, values: Sequence[PlacedValue], atoms: Sequence[Any]) -> None:
        """Measures the outputs of the program, which leave every path."""
        for i, (value, atom) in enumerate(zip(map(_decoded, values), atoms, strict=True)):
            dtype = dtype_of(atom)
            if not is_measurable(dtype):
                continue
            origin = value.origin or Origin(ModulePass())
            if origin.measurement is None or origin.measurement.output is not None:
                self._measured(value, origin, dtype)
            assert origin.measurement is not None
            origin.measurement.output = i
            if value.origin is not None:
                left = places_around(origin.place, ()) or {origin.place: None}
                origin.measurement.returned.update(left)

    # Bodies ---------------------------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        pairs = depends(equation, [len(value.arrays) > 1 for value in values], self.apart)
        place = self.place_of(equation)
        origin = Origin(place, *self.made_by(equation, place, values))
        stacked = sum(scan_arity(equation)[1:]) if equation.primitive.name == "scan" else len(pairs)
        kinds = [PlacedValue([None] * (1 + pair), dataclasses.replace(origin)) for pair in pairs]
        for kind, variable in zip(kinds[stacked:], equation.outvars[stacked:], strict=True):
            is_saved = self.has_gradients and variable.aval.size >= _LARGE
            dtype = dtype_of(variable)
            if is_saved and len(kind.arrays) > 1 and dtype in _ENCODED:
                kind.origin.coded = dtype
        return kinds

    def entering(self, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        origins = [value.origin or Origin(self.place) for value in values]
        places = [origin.place._replace(path=self.place.path) for origin in origins]
        return [
            PlacedValue(value.arrays, Origin(place, coded=origin.coded))
            for value, place, origin in zip(values, places, origins, strict=True)
        ]

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        value = _decoded(value)
        if len(value.arrays) != len(like.arrays):
            value = PlacedValue([value.arrays[0], widen(value.arrays[-1])], value.origin)
        if like.origin is None or like.origin.coded is None:
            return value
        return PlacedValue([_encoded(*value.arrays), value.arrays[1]], like.origin)


def _is_cheap(equation: Equation) -> bool:
    """Returns whether an equation may be rematerialised.

    It must take negligible time, and have no effects.
    """
    name = equation.primitive.name
    is_half_dot = name in MATMULS and is_half(dtype_of(equation.outvars[0]))
    is_opaque = CATEGORY_OF.get(name) in (None, "opaque", "control")
    return not (name in CONTROL_FLOW or is_half_dot or equation.effects or is_opaque)


# --------------------------------------------------------------------------------------------------
# Residuals that a scan stacks for the backward pass
# --------------------------------------------------------------------------------------------------


def _encoded(array: Any, wide: Any) -> Any:
    """Encodes an array that a scan stacks as a residual, beside that of float32, in 16 bits.

    A float32 array is stored as its difference from that of float32 in bfloat16, which is exact to
    one part in 256; zeros are exact. The errors of values that depend on it are known as exactly.
    Half arrays are stored as their bits: backends that compute in float32 would widen them for all
    steps at once.
    """
    if is_half(array.dtype):
        return lax.bitcast_convert_type(array, jnp.uint16)
    difference = jnp.where(array == wide, jnp.zeros((), wide.dtype), array - wide).astype(
        jnp.bfloat16
    )
    bits = lax.bitcast_convert_type(difference, jnp.uint16)
    return jnp.where((array == 0) & (wide != 0), _IS_ZERO, bits)


def _decoded(value: PlacedValue) -> PlacedValue:
    """Returns a value with its first array decoded."""
    if value.origin is None or value.origin.coded is None:
        return value
    (bits, wide), dtype = value.arrays, value.origin.coded
    array = lax.bitcast_convert_type(bits, dtype if is_half(dtype) else jnp.bfloat16)
    if not is_half(dtype):
        array = jnp.where(array == 0, wide, wide + array.astype(wide.dtype))
        array = jnp.where(bits == _IS_ZERO, jnp.zeros((), wide.dtype), array)
    return PlacedValue([array, wide], dataclasses.replace(value.origin, coded=None))

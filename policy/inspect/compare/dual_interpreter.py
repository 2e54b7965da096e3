"""Runs a program and its float32 counterpart, and measures values that pass between modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.compare.log import Log, MeasuredCodes, Measurement, Origin
from policy.inspect.compare.stacked import ENCODED, decoded, encoded, is_encoded
from policy.inspect.compare.statistics import (
    is_discrete,
    is_measurable,
    largest_alone,
    measured,
    shares_of_codes,
)
from policy.programs.dtypes import is_half
from policy.programs.jaxprs import Equation, OpenJaxpr, bind, scan_arity
from policy.programs.marks import AUTOCAST, BOUNDARY
from policy.programs.paths import Path
from policy.programs.primitives import INLINED, MATMULS, category_of
from policy.programs.reading.matmul_operands import LIMITS_CODES, NO_CODES, Codes, QuantisedOperand
from policy.programs.reading.source_lines import is_by_layers, layer_of, source_of
from policy.programs.rewriting.control_flow import CONTROL_FLOW
from policy.programs.rewriting.placed_interpreter import (
    NO_REFERENCE,
    ModulePass,
    PlacedInterpreter,
    PlacedValue,
    Reference,
)
from policy.programs.rewriting.upcast import (
    Device,
    Upcast,
    depends,
    dtype_of,
    in_passes,
    is_apart,
    widen,
)

_LARGE = 1024  # elements


class Paired(PlacedInterpreter):
    """Runs a program on values of one array or two.

    A value that does not depend on half precision is one array. Any other value is two: the
    program's own, and that of float32.

    Args:
      log: the record to write.
      has_gradients: whether the program returns gradients.
      reference: the differences of the program from the function in float32.
      codes: the program's operations on 8-bit codes.
      passes: the `id`s of float32 matmuls to multiply as `device` does.
      device: the device, or None.
    """

    def __init__(
        self,
        log: Log,
        has_gradients: bool = False,
        reference: Reference = NO_REFERENCE,
        codes: Codes = NO_CODES,
        passes: Collection[int] = (),
        device: Device | None = None,
    ):
        super().__init__(reference)
        self.log, self.has_gradients, self.codes = log, has_gradients, codes
        self.passes = frozenset(passes)
        self.device: Device | None = device
        self.apart = frozenset(reference.constants) | codes.ids | self.passes
        self.again: dict[int, tuple[PlacedValue, Any]] = {}
        self._line_around = ""  # the source line of the enclosing equation

    def inside(self, equation: Equation) -> Self:
        inner = super().inside(equation)
        inner._line_around = source_of(equation) or self._line_around
        return inner

    def tracing(self, program: Any, role: str) -> Self:
        inner = super().tracing(program, role)
        inner.again = {}
        return inner

    # Equations ------------------------------------------------------------------------------------

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        place = self.place_of(equation)
        self._met(place)
        if equation.primitive.name not in INLINED:
            stacked = (
                sum(scan_arity(equation)) if equation.primitive.name == "scan" else len(values)
            )
            values = [*map(decoded, values[:stacked]), *values[stacked:]]
            for value, atom in zip(values, equation.invars, strict=True):
                self._read(value, place, dtype_of(atom))
            if place.direction == "backward":
                values = [self._saved(value) for value in values]
        name, pairs = equation.primitive.name, [len(value.arrays) > 1 for value in values]
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
        differs = device is not None or any(depends(equation, pairs))
        if not differs and at not in self.codes.roundings:
            lanes = [[output] for output in outputs]
        else:
            wide = Upcast(self.codes.roundings).standing_in(self)
            references = wide.equation(
                equation, [PlacedValue([float32_of(value)]) for value in values]
            )
            lanes = [
                [output, found.arrays[0]] for output, found in zip(outputs, references, strict=True)
            ]
        name, source = self._made_by(equation, place, values)
        made = [(equation, values, i) if _is_cheap(equation) else None for i in range(len(lanes))]
        is_inner = at in self.codes.inner
        return [
            PlacedValue(lane, Origin(place, name, source, made=m, is_inner=is_inner))
            for lane, m in zip(lanes, made, strict=True)
        ]

    def _made_by(
        self, equation: Equation, place: ModulePass, values: Sequence[PlacedValue]
    ) -> tuple[str, str]:
        """Returns the user's operation that made a result, and its source line.

        The result of a cast of this library was made by the operation before.
        """
        stack = str(equation.source_info.name_stack)
        origin = values[0].origin if len(values) == 1 else None
        is_cast = equation.primitive.name == "convert_element_type"
        if (
            is_cast
            and (BOUNDARY in stack or AUTOCAST in stack or is_by_layers(equation))
            and origin
            and origin.source
        ):
            return origin.primitive, origin.source
        source = source_of(equation) or self._line_around
        return equation.primitive.name, source or layer_of(equation, place.path)

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        return [
            PlacedValue([value.arrays[0], found[k]], value.origin) if k in found else value
            for k, value in enumerate(values)
        ]

    def _met(self, place: ModulePass) -> None:
        if place in self.log.places or place.direction == "again":
            return
        for length in range(1 if place.path else 0, len(place.path) + 1):
            self.log.places.setdefault(ModulePass(place.path[:length], place.direction))

    # Measurements ---------------------------------------------------------------------------------

    def _read(self, value: PlacedValue, reader: ModulePass, dtype: DTypeLike) -> None:
        """Measures a value when it is first read outside of the path that computed it."""
        origin = value.origin
        if origin is None or origin.place.path == reader.path or not is_measurable(dtype):
            return
        if origin.is_inner:
            return
        if is_discrete(dtype) and len(value.arrays) == 1:
            return  # both programs have the same array
        if reader.direction != origin.place.direction or reader.direction == "again":
            return  # saved for the backward pass, where it is read in its own module
        left, entered = _crossed(origin.place.path, reader)
        measurement = origin.measurement or self._measured(value, origin, dtype)
        measurement.left.update(left)
        measurement.entered.update(entered)

    def _measured(self, value: PlacedValue, origin: Origin, dtype: DTypeLike) -> Measurement:
        measurement = Measurement(
            len(self.log.measurements),
            origin.primitive,
            origin.source,
            dtype,
            origin.place,
            self.bodies,
        )
        self.log.measurements.append(measurement)
        origin.measurement = measurement
        own = value.arrays[0]
        is_pair = len(value.arrays) > 1
        note = (
            measured(own, value.arrays[1], self.axes) if is_pair else largest_alone(own, self.axes)
        )
        self.notes[measurement.key] = note
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
        note = shares_of_codes(codes, _unlimited(value).arrays[0])
        self.notes[-1 - len(self.log.codes)] = lax.pmean(note, self.axes) if self.axes else note
        self.log.codes.append(MeasuredCodes(-1 - len(self.log.codes), of, codes.dtype))

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
        if (
            origin is None
            or origin.made is None
            or (origin.measurement is not None and is_half(array.dtype))
        ):
            return self._after(array)
        equation, operands, i = origin.made
        return bind(equation, [self._once_more(operand) for operand in operands])[i]

    def returned(self, values: Sequence[PlacedValue], atoms: Sequence[Any]) -> None:
        """Measures the outputs of the program, which leave every path."""
        for i, (value, atom) in enumerate(zip(map(decoded, values), atoms, strict=True)):
            dtype = dtype_of(atom)
            if not is_measurable(dtype):
                continue
            origin = value.origin or Origin(ModulePass())
            if origin.measurement is None or origin.measurement.output is not None:
                self._measured(value, origin, dtype)
            assert origin.measurement is not None
            origin.measurement.output = i
            if value.origin is not None:
                outside = ModulePass((), origin.place.direction)
                left, _ = _crossed(origin.place.path, outside)
                origin.measurement.returned.update(left or {outside: None})

    # Bodies ---------------------------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        pairs = depends(equation, [len(value.arrays) > 1 for value in values], self.apart)
        place = self.place_of(equation)
        origin = Origin(place, *self._made_by(equation, place, values))
        stacked = sum(scan_arity(equation)[1:]) if equation.primitive.name == "scan" else len(pairs)
        kinds = [PlacedValue([None] * (1 + pair), dataclasses.replace(origin)) for pair in pairs]
        for kind, variable in zip(kinds[stacked:], equation.outvars[stacked:], strict=True):
            is_saved = self.has_gradients and variable.aval.size >= _LARGE
            dtype = dtype_of(variable)
            if is_saved and len(kind.arrays) > 1 and dtype in ENCODED:
                kind.origin.coded = dtype
        return kinds

    def entering(self, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        places = [value.origin.place if value.origin else self.place for value in values]
        return [
            PlacedValue(
                value.arrays,
                Origin(
                    ModulePass(self.place.path, place.direction),
                    coded=value.origin and value.origin.coded,
                ),
            )
            for value, place in zip(values, places, strict=True)
        ]

    def body(
        self, jaxpr: OpenJaxpr, consts: Sequence[PlacedValue], args: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        """Runs a body, whose measurements are known only inside it."""
        args = [
            PlacedValue(v.arrays, v.origin and dataclasses.replace(v.origin, made=None))
            for v in args
        ]
        outputs = super().body(jaxpr, consts, args)
        for value, atom in zip(map(decoded, outputs), jaxpr.outvars, strict=True):
            self._read(value, self.place, dtype_of(atom))
        return outputs

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        value = decoded(value)
        if len(value.arrays) != len(like.arrays):
            value = PlacedValue([value.arrays[0], float32_of(value)], value.origin)
        return (
            PlacedValue([encoded(*value.arrays), value.arrays[1]], like.origin)
            if is_encoded(like)
            else value
        )


def _is_cheap(equation: Equation) -> bool:
    """Returns whether an equation may be rematerialised.

    It must take negligible time, and have no effects.
    """
    name = equation.primitive.name
    is_half_dot = name in MATMULS and is_half(dtype_of(equation.outvars[0]))
    category = category_of(name)
    return not (
        name in CONTROL_FLOW
        or is_half_dot
        or equation.effects
        or category in (None, "opaque", "control")
    )


def _unlimited(value: PlacedValue) -> PlacedValue:
    """Returns what a value was before it was limited and rounded for a cast to 8 bits."""
    while value.origin is not None and value.origin.made is not None:
        equation, operands, _ = value.origin.made
        if equation.primitive.name not in LIMITS_CODES:
            return value
        shape = value.arrays[0].shape
        whole = [one for one in operands if one.origin and one.arrays[0].shape == shape]
        if len(whole) != 1:
            return value
        (value,) = whole
    return value


def float32_of(value: PlacedValue) -> Any:
    """Returns the array of a value in float32."""
    wide = value.arrays[1:]
    return wide[0] if wide else widen(value.arrays[0])


def _crossed(origin: Path, reader: ModulePass) -> tuple[dict[ModulePass, None], ...]:
    """Returns the places that a value leaves, innermost first, and enters, outermost first."""
    path = reader.path
    left = (origin[:n] for n in range(len(origin), 0, -1) if path[:n] != origin[:n])
    entered = (path[:n] for n in range(1, len(path) + 1) if path[:n] != origin[:n])
    return tuple(
        dict.fromkeys(ModulePass(path, reader.direction) for path in paths)
        for paths in (left, entered)
    )

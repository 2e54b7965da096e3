"""Evaluates a traced program with casts inserted."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.autocasting.broadcast_operands import (
    broadcast_product,
    is_broadcast,
    is_half_value,
    sums_cotangents,
    widened_operand,
)
from policy.autocasting.normalizations import NOWHERE, Regions, normalizations
from policy.autocasting.report import OPAQUE_MATMUL, Report
from policy.autocasting.scanned_layers import carries_handed_on
from policy.autocasting.settings import Place, Places, Settings
from policy.autocasting.values import (
    CastValue,
    as_dtype,
    cast,
    common_dtype,
    fits,
    fits_in_range,
    has_range_of_float32,
    is_input,
    makes_table,
    meets_tables,
    saturated,
    saturates,
    widened_param,
)
from policy.core.precision import canonical_precision
from policy.eight_bits import scaled_convolution, scaled_matmul
from policy.programs import marks
from policy.programs.broadcasting import repeated, sharding_of
from policy.programs.dtypes import F32, float_dtype, is_floating_dtype
from policy.programs.interpreter import Interpreter, TracedBody, equations_of, readers_of
from policy.programs.outlining import is_part
from policy.programs.paths import Path, path_of
from policy.programs.primitives import (
    BROADCASTS,
    COMPARISONS,
    EXACT,
    FORWARD_ADDITIONS,
    KEEPS_CONSTANTS,
    MATMULS,
    MOVES_COTANGENTS,
    NARY,
    PRODUCTS,
    READS_LOGITS,
    REBUILT,
)
from policy.programs.protocols import Equation, OpenJaxpr
from policy.programs.subprograms import bind, programs_of
from policy.programs.walk import walk

_NONE: collections.Counter[str] = collections.Counter()
_CHOOSES = EXACT - COMPARISONS

AutocastHandler = Callable[["Evaluator", Any, list[CastValue]], list[CastValue]]


class Evaluator(Interpreter[CastValue]):
    """Runs the equations of a jaxpr on values that are half where the trace has float32.

    Attributes:
      settings: the arguments of the autocast.
      places: the dtypes at each module path.
      path: the module path of the equation whose body is being run.
      report: the report to note casts in, or None.
      held: the regions of the programs of the enclosing equation, by identity; None at the top. Any
        other program is a derivative rule, whose regions are found when it is run.
      is_whole: whether all of the enclosing equation belongs to a normalisation.
      regions: the normalisations of the program that is being run.
      readers: the primitives that read each of its variables, and how often; "" stands for the
        program's caller.
      widened: the operands of a softmax's ``x - max(x)``, read in float32, so that the maximum is
        one of the same numbers.
      handlers: the functions that rebuild equations that hold programs, by primitive.
    """

    def __init__(
        self,
        settings: Settings,
        places: Places,
        handlers: Mapping[str, AutocastHandler],
        report: Report | None = None,
    ):
        super().__init__()
        self.settings, self.places, self.handlers, self.report = settings, places, handlers, report
        self.path: Path = ()
        self.held: dict[int, Regions] | None = None
        self.is_whole = False
        self.regions = NOWHERE
        self.readers: dict[Any, collections.Counter[str]] = {}
        self.widened: set[Any] = set()

    # Values ---------------------------------------------------------------------------------------

    def constant(self, array: Any) -> CastValue:
        half = self.settings.policy.compute_dtype
        half = half if half.itemsize < F32.itemsize else np.dtype(np.float16)
        may_be = self.settings.narrows and is_floating_dtype(array.dtype)
        is_table = may_be and fits_in_range(array, half)
        return CastValue(array, is_table=is_table)

    def literal(self, literal: jex_core.Literal) -> CastValue:
        dtype = getattr(literal.aval, "dtype", None)
        number = literal.val if dtype is None else np.asarray(literal.val, dtype)
        is_number = (
            isinstance(number, np.ndarray) and number.ndim == 0 and is_floating_dtype(number.dtype)
        )
        return CastValue(number, yields=True, constant=number[()] if is_number else None)

    def arrays(self, value: CastValue) -> tuple[Any]:
        return (value.array,)

    def filled(self, value: CastValue, arrays: Sequence[Any]) -> CastValue:
        (array,) = arrays
        return dataclasses.replace(value, array=array, narrowed=None, widened=None, transposed=None)

    # Programs inside equations --------------------------------------------------------------------

    def merge(
        self,
        equation: Equation,
        values: Sequence[CastValue],
        branches: Sequence[TracedBody[CastValue]] = (),
    ) -> Sequence[CastValue | None]:
        """Returns the dtypes of the outputs of a loop, of branches, or of a jit with shardings.

        They are the traced dtypes, with two exceptions. Scanned layers carry half precision if a
        rule gives them a half output_dtype, and a conditional returns half precision if every
        branch does.
        """
        name = equation.primitive.name
        if name == "scan":
            carried = carries_handed_on(self, equation, values)
            return [*carried, *([None] * (len(equation.outvars) - len(carried)))]
        if name == "cond":
            outputs = zip(equation.outvars, *(branch.outputs for branch in branches), strict=True)
            return [_merged(variable, found) for variable, *found in outputs]
        return (
            list(map(traced_kind, equation.outvars))
            if name in REBUILT
            else super().merge(equation, values)
        )

    def settled(self, value: CastValue, like: CastValue) -> CastValue:
        dtype = float_dtype(like.array)
        return CastValue(
            value.array if dtype is None else cast(value.array, dtype), narrows=like.narrows
        )

    def inside(self, equation: Equation, *, reports: bool = True) -> Evaluator:
        inner = copy.copy(self)
        inner.path, inner.held = self.path_of(equation), self.held_by(equation)
        inner.is_whole, inner.regions = self._is_whole(equation), NOWHERE
        inner.report = self.report if reports else None
        return inner

    def held_by(self, equation: Equation) -> dict[int, Regions]:
        """Returns the regions of the programs of an equation, by identity."""
        known = self.regions.within(equation)
        return {id(program): known.get(id(program), NOWHERE) for program in programs_of(equation)}

    def _is_whole(self, equation: Equation) -> bool:
        """Returns whether the programs of an equation belong to a normalisation as a whole."""
        if self.is_whole or not self.regions.programs:
            return self.is_whole
        held = [*self.held_by(equation).values()] if self.regions.within(equation) else []
        return bool(held) and all(regions.is_whole for regions in held)

    def place_of(self, equation: Equation) -> Place:
        """Returns the dtypes of an equation, by its path and its part in a normalisation."""
        place = self.places[self.path_of(equation)]
        region: Literal["applies", "measures"] | None = None
        if id(equation) in self.regions.applies:
            region = "applies"
        elif id(equation) in self.regions.measures or self._is_whole(equation):
            region = "measures"
        return place.within(region)

    def saved(self, equation: Equation, values: Sequence[CastValue]) -> list[CastValue]:
        """Returns operands to save as residuals: half precision if the body would narrow them."""
        place = self.place_of(equation)
        return (
            list(values)
            if place.region
            else [self._narrowed(value, "control", place) for value in values]
        )

    # The run --------------------------------------------------------------------------------------

    def run(
        self, jaxpr: OpenJaxpr, consts: Sequence[CastValue], args: Sequence[CastValue]
    ) -> list[CastValue]:
        regions = None if self.held is None else self.held.get(id(jaxpr))
        if regions is None:
            is_param = [value.yields for value in args]
            regions = normalizations(jaxpr, is_param) if self.settings.narrows else NOWHERE
        inner = copy.copy(self)
        inner.regions, inner.readers = regions, readers_of(jaxpr)
        inner.widened = {
            atom
            for equation in equations_of(jaxpr)
            if equation.primitive.name in FORWARD_ADDITIONS and inner._category(equation) == "fp32"
            for atom in equation.invars
            if not isinstance(atom, jex_core.Literal)
        }
        args = [inner._noted(v, value) for v, value in zip(jaxpr.invars, args, strict=True)]
        return super(Evaluator, inner).run(jaxpr, consts, args)

    def step(self, equation: Equation, values: list[CastValue]) -> list[CastValue]:
        # Widened where it is first read: a report attributes the cast to that module.
        values = [widened_param(value) if value.is_shared else value for value in values]
        outputs = super().step(equation, values)
        return [self._noted(v, one) for v, one in zip(equation.outvars, outputs, strict=True)]

    def _noted(self, variable: Any, value: CastValue) -> CastValue:
        """Returns a param, noted as shared if it is stored in half and read several times.

        Its readers get it in float32 and cast it, so that its cotangents are summed in float32, as
        those of params that are stored in float32.
        """
        readers = self.readers.get(variable, _NONE)
        if value.yields and is_half_value(value) and readers.total() > 1:
            return CastValue(value.array, yields=True, is_shared=True)
        return value

    def equation(self, equation: Equation, values: list[CastValue]) -> list[CastValue]:
        category = self._category(equation)
        if category == "passthrough" and equation.primitive.name == "reduce_max":
            category = "fp32" if equation.invars[0] in self.widened else category
        return self._equation(equation, category, values)

    def name_stack_of(self, equation: Equation) -> Any:
        return marks.without(equation.source_info.name_stack)

    def path_of(self, equation: Equation) -> Path:
        return path_of(str(equation.source_info.name_stack), self.path, marks=True)

    def _category(self, equation: Equation) -> str:
        """Returns the category of an equation.

        A sum or difference that only float32 operations read runs in float32, such as a softmax's
        ``x - max(x)``: rounded to half, it would be off by as much as `x` itself. It has no
        residual, so float32 costs no memory there. So does ``x * x``, as `square` does: the
        squares of a norm overflow in float16.
        """
        name = equation.primitive.name
        category = self.settings.category(name)
        if category != "promote" or not (name in FORWARD_ADDITIONS or _is_square(equation)):
            return category
        names = set(self.readers.get(equation.outvars[0], ()))
        reads_wide = {
            reader for reader in names if reader and self.settings.category(reader) == "fp32"
        }
        # The second set is that of log_softmax: the difference of its shifted logits is in float32,
        # like its logarithm.
        return "fp32" if names and names in (reads_wide, READS_LOGITS) else category

    def _equation(
        self, equation: Equation, category: str, values: list[CastValue]
    ) -> list[CastValue]:
        name, place = equation.primitive.name, self.place_of(equation)
        if (mark := marks.mark_of(equation)) is not None:
            return [_handed_on(mark, values[0], place)]
        if place.is_layer and not is_part(equation):
            return _of_layer(equation, values)
        if category == "control" and name in self.handlers:
            return self.handlers[name](self, equation, values)
        if not place.region and name != "add_any":
            values = self._read(equation, values, category, place)
        traced = {
            dtype
            for v in (*equation.invars, *equation.outvars)
            if (dtype := float_dtype(v.aval)) is not None
        }
        if name == "convert_element_type":
            done, outputs = "author's cast", [_converted(equation, values[0])]
        elif traced != {F32} and name in MOVES_COTANGENTS and values[0].yields:
            arrays = [value.array for value in values]
            done, outputs = (
                "author's dtypes",
                [CastValue(output, yields=True) for output in bind(equation, arrays)],
            )
        elif (
            (traced != {F32} and not _mixes_float32(equation, category, traced))
            or (category == "compute" and _is_complex(equation))
            or category in ("exempt", "opaque", "explicit", "control")
        ):
            done, outputs = (
                _kind_of_opaque(equation, traced, category),
                _as_traced(equation, values),
            )
        elif category == "compute" and _is_outer_product(equation, values):
            done, outputs = "float32", [_outer_product(equation, values)]
        elif category == "compute":
            done, outputs = _computed(equation, values, place)
        elif name == "add_any":
            done, outputs = self._accumulated(equation, values, place)
        elif place.compute == F32 or place.region or category == "fp32":
            follows = not (place.compute == F32 or place.region) and _follows(equation, place)
            done, outputs = (
                self._mixed(equation, values, place)
                if follows
                else self._wide(equation, values, place)
            )
        elif values[0].yields and name in BROADCASTS and sums_cotangents(equation, values):
            done, outputs = self._passed(equation, [widened_param(values[0]), *values[1:]], place)
        elif sums_cotangents(equation, values):
            done, outputs = "widened, then cast", widened_operand(equation, values)
        elif category == "passthrough":
            done, outputs = self._passed(equation, values, place)
        else:
            done, outputs = self._mixed(equation, values, place)
        if self.report is not None:
            self.report.note(self.path_of(equation), name, done, [value.array for value in outputs])
        floats = [value for value in values if is_floating_dtype(value.dtype)]
        if self.settings.narrows and makes_table(floats, place.compute):
            for output in outputs:
                output.is_table = True
        elif category == "promote" and is_input(floats, place.compute):
            for output in outputs:
                output.weak = True
        return outputs

    def _read(
        self, equation: Equation, values: list[CastValue], category: str, place: Place
    ) -> list[CastValue]:
        """Returns operands as an equation reads them: narrowed, except in sums with float32."""
        narrowed = [self._narrowed(value, category, place) for value in values]
        if equation.primitive.name in FORWARD_ADDITIONS and narrowed != values:
            floats = [value for value in narrowed if is_floating_dtype(value.dtype)]
            is_wide = common_dtype(floats, place.compute) == F32
            if is_wide and not self._meets_tables(floats, place):
                return values
        return narrowed

    def _narrowed(self, value: CastValue, category: str, place: Place) -> CastValue:
        """Casts the result of a normalisation for readers in other modules."""
        if not value.narrows or category == "fp32" or place.compute == F32:
            return value
        if value.narrowed is None or value.narrowed.dtype != place.compute:
            # One cast for all readers, as an author writes it: queries, keys and values would each
            # save a copy.
            value.narrowed = CastValue(cast(value.array, place.compute))
        return value.narrowed

    def _meets_tables(self, floats: Sequence[CastValue], place: Place) -> bool:
        is_half = self.settings.narrows and place.compute != F32
        return is_half and meets_tables(floats, place.compute)

    def _wide(
        self, equation: Equation, values: list[CastValue], place: Place
    ) -> tuple[str, list[CastValue]]:
        outputs = _as_traced(equation, values)
        floats = [value for value in values if is_floating_dtype(value.dtype)]
        if floats and all(value.yields for value in floats):
            return "float32", [CastValue(output.array, yields=True) for output in outputs]
        if place.region == "applies":
            return "float32, read in half", [
                CastValue(output.array, narrows=True) for output in outputs
            ]
        return "float32", outputs

    def _accumulated(
        self, equation: Equation, values: list[CastValue], place: Place
    ) -> tuple[str, list[CastValue]]:
        """Returns the sum of two cotangents in float32.

        Further sums read it in float32. Other operations read it narrowed, if both operands are
        half precision or may be narrowed themselves.
        """
        is_half = place.region == "applies" or all(
            value.narrows or value.dtype == place.compute != F32 for value in values
        )
        return "float32", [
            CastValue(output.array, narrows=is_half) for output in _as_traced(equation, values)
        ]

    def _passed(
        self, equation: Equation, values: list[CastValue], place: Place
    ) -> tuple[str, list[CastValue]]:
        if _holds_program(equation):
            return "as traced", _as_traced(equation, values)
        is_param = values[0].yields and values[0].constant is None and values[0].array.ndim
        if equation.primitive.name == "gather" and is_param and self.settings.narrows:
            looked_up = bind(equation, [value.array for value in values])
            return "looked up, then cast", [
                CastValue(cast(output, place.compute)) for output in looked_up
            ]
        outputs = _bound_or_traced(equation, values, [value.array for value in values])
        if (
            equation.primitive.name == "transpose"
            and values[0].yields
            and values[0].constant is None
        ):
            axes = tuple(equation.params["permutation"])
            return "operand dtype", [
                CastValue(outputs[0].array, yields=True, transposed=(values[0], axes))
            ]
        if (
            len(values) == len(outputs)
            or len([v for v in values if is_floating_dtype(v.dtype)]) == 1
        ):
            sources = (
                values if len(values) == len(outputs) else [_only_float(values)] * len(outputs)
            )
            keeps = equation.primitive.name in KEEPS_CONSTANTS
            outputs = [
                CastValue(output.array, source.yields, source.constant, weak=source.weak)
                if keeps
                else CastValue(
                    output.array, source.yields and _fits(source, place.compute), weak=source.weak
                )
                for output, source in zip(outputs, sources, strict=True)
            ]
        return "operand dtype", outputs

    def _mixed(
        self, equation: Equation, values: list[CastValue], place: Place
    ) -> tuple[str, list[CastValue]]:
        floats = [value for value in values if is_floating_dtype(value.dtype)]
        if _holds_program(equation) or not floats:
            return "as traced", _as_traced(equation, values)
        selects = equation.primitive.name == "select_n"
        dtype = common_dtype(floats, place.compute, selects=selects)
        if all(value.yields for value in floats):
            big = not all(_fits(value, place.compute) for value in floats)
            outputs = _as_traced(equation, values)
            return "float32", [CastValue(output.array, yields=not big) for output in outputs]
        is_activation = dtype == F32 and self._meets_tables(floats, place)
        if is_activation and equation.primitive.name in _CHOOSES:
            dtype = place.compute  # rounded now or afterwards, the numbers are the same
        elif is_activation:
            outputs = _as_traced(equation, values)
            return "float32, read in half", [
                CastValue(output.array, narrows=is_floating_dtype(output.dtype))
                for output in outputs
            ]
        shape = equation.outvars[0].aval.shape if equation.primitive.name in NARY else None
        arrays = [_operand(value, dtype, shape, equation) for value in values]
        done = "float32" if dtype == F32 else str(dtype)
        is_product = equation.primitive.name in PRODUCTS and dtype != F32
        if is_product and any(is_broadcast(value, shape) for value in values):
            return done, broadcast_product(equation, values, arrays, dtype)
        return done, _bound_or_traced(equation, values, arrays)


def traced_kind(variable: Any) -> CastValue:
    """Returns a value of the dtype that a variable was traced with."""
    return CastValue(variable.aval)


def _merged(variable: Any, outputs: Sequence[CastValue]) -> CastValue:
    """Returns a value like an output of a conditional.

    It is half precision if every branch returns half precision, otherwise as traced.
    """
    dtype, found = float_dtype(variable.aval), {output.dtype for output in outputs}
    narrows = any(output.narrows for output in outputs)
    if dtype is None:
        return CastValue(variable.aval, narrows=narrows)
    dtype = next(iter(found)) if len(found) == 1 else dtype
    return CastValue(jax.ShapeDtypeStruct(variable.aval.shape, dtype), narrows=narrows)


def _fits(value: CastValue, dtype: np.dtype) -> bool:
    return value.constant is None or fits(value.constant, dtype)


def _only_float(values: Sequence[CastValue]) -> CastValue:
    return next(value for value in values if is_floating_dtype(value.dtype))


def _operand(
    value: CastValue, dtype: np.dtype, shape: tuple[int, ...] | None, equation: Equation
) -> Any:
    """Returns the array of a value in the dtype of an elementwise operation.

    It is broadcast in float32, so that its cotangent is summed there.
    """
    if not is_floating_dtype(value.dtype):
        return value.array
    if value.constant is not None and saturates(value.constant, dtype):
        return saturated(value.array, dtype)
    is_product = equation.primitive.name in PRODUCTS
    if dtype == F32 or is_product or shape is None or not is_broadcast(value, shape):
        return as_dtype(value, dtype)
    return repeated(as_dtype(value, F32), shape, dtype, sharding_of(equation))


def as_traced(atoms: Sequence[Any], values: Sequence[CastValue]) -> list[Any]:
    """Returns the arrays of values in the dtypes that they were traced with."""
    return [
        as_dtype(value, dtype) if (dtype := float_dtype(atom.aval)) is not None else value.array
        for atom, value in zip(atoms, values, strict=True)
    ]


def _as_traced(equation: Equation, values: Sequence[CastValue]) -> list[CastValue]:
    return [CastValue(output) for output in bind(equation, as_traced(equation.invars, values))]


def _is_square(equation: Equation) -> bool:
    """Returns whether an equation multiplies a value by itself."""
    return equation.primitive.name == "mul" and equation.invars[0] is equation.invars[1]


def _is_complex(equation: Equation) -> bool:
    """Returns whether an operand or a result is complex; matmuls may mix real and complex ones."""
    return any(
        jnp.issubdtype(getattr(v.aval, "dtype", np.bool_), jnp.complexfloating)
        for v in (*equation.invars, *equation.outvars)
    )


def _mixes_float32(equation: Equation, category: str, traced: set[Any]) -> bool:
    """Returns whether a matmul multiplies float32 with half precision."""
    operands = {float_dtype(v.aval) for v in equation.invars}
    return category == "compute" and F32 in operands and {d.itemsize for d in traced} == {2, 4}


def _of_layer(equation: Equation, values: Sequence[CastValue]) -> list[CastValue]:
    """Evaluates an equation of a layer that obeys a policy itself, in its traced dtypes.

    The casts at its boundary are dropped if the code around it already computes in the layer's
    dtype.
    """
    if equation.primitive.name == "convert_element_type":
        target = np.dtype(equation.params["new_dtype"])
        if values[0].dtype == target:
            return [CastValue(values[0].array)]
    return _as_traced(equation, values)


def _handed_on(mark: str, value: CastValue, place: Place) -> CastValue:
    """Evaluates a mark: the value as the code that it is handed to reads it."""
    if mark == marks.KEPT:
        return CastValue(as_dtype(value, F32))
    if value.dtype == F32 or place.compute == F32:
        return CastValue(value.array, narrows=value.dtype == F32 != place.compute)
    return CastValue(cast(value.array, place.compute))


def _bound_or_traced(
    equation: Equation, values: Sequence[CastValue], arrays: Sequence[Any]
) -> list[CastValue]:
    try:
        return [CastValue(output) for output in bind(equation, arrays)]
    except (TypeError, NotImplementedError):  # the primitive takes no half precision
        return _as_traced(equation, values)


def _kind_of_opaque(equation: Equation, traced: set[Any], category: str) -> str:
    if traced and traced != {F32}:
        return "author's dtypes"
    return opaque_kind(equation) if category in ("opaque", "control") else "as traced"


def opaque_kind(equation: Equation) -> str:
    """Returns the word of reports for an equation that is left as it was traced."""
    return OPAQUE_MATMUL if any(map(_has_matmul, programs_of(equation))) else "opaque"


def _has_matmul(program: OpenJaxpr) -> bool:
    return any(site.name in MATMULS for site in walk(program))


def _holds_program(equation: Equation) -> bool:
    """Returns whether an equation holds a program, whose dtypes are fixed.

    One is the scatter of `x.at[i].apply`.
    """
    return any(True for _ in programs_of(equation))


def _follows(equation: Equation, place: Place) -> bool:
    """Returns whether a power can run in half precision.

    x**3, as in gelu, is two products. x**2 may be part of a variance.
    """
    power = equation.params.get("y") if equation.primitive.name == "integer_pow" else None
    return power is not None and power > 2 and has_range_of_float32(place.compute)


def _computed(
    equation: Equation, values: Sequence[CastValue], place: Place
) -> tuple[str, list[CastValue]]:
    """Evaluates a matmul or convolution with its operands and result in compute_dtype."""
    params, dtype = dict(equation.params), place.compute
    precision = params.get("precision")
    is_algorithm = precision is not None and not isinstance(precision, (tuple, list, lax.Precision))
    if is_algorithm:  # the algorithm names the dtypes of its operands
        return "author's algorithm", _as_traced(equation, values)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if precision is None and place.precision is not None:
        params["precision"] = canonical_precision(place.precision)
    arrays = [
        as_dtype(value, dtype) if is_floating_dtype(value.dtype) else value.array
        for value in values
    ]
    weights = [side for side, value in enumerate(values) if value.yields]
    by = place.matmul if len(weights) == 1 else None
    if by is not None and _may_be_scaled(equation, arrays, weights[0]):
        product = _scaled(equation, arrays, by, weights[0], dtype)
        return str(by.operands), [CastValue(cast(product, dtype))]
    return str(dtype), [CastValue(output) for output in bind(equation, arrays, params)]


def _is_outer_product(equation: Equation, values: Sequence[CastValue]) -> bool:
    """Returns whether an equation multiplies tables, such as positions and frequencies, as a dot
    without a contraction.
    """
    return (
        equation.primitive.name == "dot_general"
        and not any(equation.params["dimension_numbers"][0])
        and equation.params.get("out_sharding") is None
        and all(value.is_table or value.yields for value in values)
    )


def _outer_product(equation: Equation, values: Sequence[CastValue]) -> CastValue:
    """Evaluates a dot without a contraction as a multiplication, which no device rounds."""
    batch = equation.params["dimension_numbers"][1]
    a, b = (
        jnp.moveaxis(array, axes, range(len(axes)))
        for array, axes in zip(as_traced(equation.invars, values), batch, strict=True)
    )
    shared, rank = len(batch[0]), equation.outvars[0].aval.ndim
    a = lax.expand_dims(a, range(a.ndim, rank))
    b = lax.expand_dims(b, range(shared, shared + rank - b.ndim))
    return CastValue(lax.mul(*jnp.broadcast_arrays(a, b)))


def _may_be_scaled(equation: Equation, arrays: Sequence[Any], weight: int) -> bool:
    """Returns whether a matmul or convolution runs in 8 bits, of which one operand is a parameter.

    Those of a backward pass that was traced do not: backward of operations in 8 bits has its own.

    Args:
      arrays: the operands.
      weight: the operand that is a parameter, by index.
    """
    name, params = equation.primitive.name, equation.params
    is_one = name == "dot_general" or (
        name == "conv_general_dilated"
        and weight == 1
        and scaled_convolution.may_run_in_8_bits(arrays[0], arrays[1], params["batch_group_count"])
    )
    return (
        is_one
        and params.get("out_sharding") is None
        and "transpose(" not in str(equation.source_info.name_stack)
    )


def _scaled(
    equation: Equation,
    arrays: Sequence[Any],
    by: scaled_matmul.ScaledMatmul,
    weight: int,
    dtype: np.dtype,
) -> jax.Array:
    """Returns the result of a matmul in 8 bits in `dtype`, or of a convolution in float32."""
    if equation.primitive.name == "conv_general_dilated":
        names = scaled_convolution.OPTIONS
        options = {name: equation.params[name] for name in names}
        return scaled_convolution.scaled_conv(arrays[0], arrays[1], by, **options)
    return scaled_matmul.scaled_dot_general(
        arrays[0],
        arrays[1],
        equation.params["dimension_numbers"],
        by,
        weight="rhs" if weight else "lhs",
        dtype=dtype,
    )


def _converted(equation: Equation, value: CastValue) -> CastValue:
    """Evaluates the author's own cast."""
    source, target = float_dtype(equation.invars[0].aval), np.dtype(equation.params["new_dtype"])
    if source == target == F32:
        return value
    output = cast(value.array, target)
    if source is not None or not is_floating_dtype(target):
        is_param = value.yields and value.constant is None and is_floating_dtype(target)
        return CastValue(output, yields=is_param and target.itemsize < F32.itemsize)
    # A mask of zeros and ones is exact in any dtype; positions and counts are not.
    constant = None if value.constant is None else np.asarray(value.constant).astype(target)[()]
    return CastValue(
        output, yields=value.dtype == np.bool_ or value.constant is not None, constant=constant
    )

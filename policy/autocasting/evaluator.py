"""Evaluates a traced program with casts inserted."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from policy.autocasting.operations import CastOperation, fits_in_range
from policy.autocasting.quotients import Quotient, quotients
from policy.autocasting.regions import NOWHERE, Regions, regions_of
from policy.autocasting.report import Report
from policy.autocasting.settings import Place, Places, Settings
from policy.autocasting.values import CastValue, Values, bound_as_traced, cast
from policy.autocasting.x64 import without_float64
from policy.core.scope import Scope, enter
from policy.programs import marks
from policy.programs.dtypes import F32, float_dtype, is_floating_dtype, is_half
from policy.programs.jaxprs import Equation, OpenJaxpr, programs_of, subprogram
from policy.programs.paths import Path, path_of
from policy.programs.primitives import (
    FORWARD_ADDITIONS,
    PICKS,
    READS_LOGITS,
    REARRANGES,
    REBUILT,
)
from policy.programs.rewriting.interpreter import Interpreter
from policy.programs.rewriting.outlining import is_part
from policy.quantized.array import QuantizedArray, widened_layout

AutocastHandler = Callable[["Evaluator", Any, Values], Values]


@dataclasses.dataclass(eq=False)
class Evaluator(Interpreter[CastValue]):
    """Runs the equations of a jaxpr on values that are half where the trace has float32.

    Attributes:
      settings: the arguments of the autocast.
      places: the dtypes at each module path.
      handlers: the functions that rebuild equations that hold programs, by primitive.
      report: the report to note casts in, or None.
      scope: the one that the program was traced in, for rules that JAX traces later; None of a
        function whose layers return what they compute.
      path: the module path of the equation whose body is being run.
      held: the regions of the programs of the enclosing equation, by identity; None at the top. Any
        other program is a derivative rule, whose regions are found when it is run.
      is_whole: whether all of the enclosing equation belongs to a normalization.
      regions: the normalizations of the program that is being run.
      readers: the primitives that read each of its variables, and how often; "" stands for the
        program's caller.
      picked: the variables that an operation picks elements of.
      widened: the operands of a softmax's ``x - max(x)``, read in float32, so that the maximum is
        one of the same numbers.
      quotients: the divisions of two functions of one variable, by identity.
      sources: the values of these variables.
    """

    settings: Settings
    places: Places
    handlers: Mapping[str, AutocastHandler]
    report: Report | None = None
    scope: Scope | None = None
    path: Path = ()
    held: dict[int, Regions] | None = None
    is_whole: bool = False
    regions: Regions = NOWHERE
    readers: dict[Any, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    picked: set[Any] = dataclasses.field(default_factory=set)
    widened: set[Any] = dataclasses.field(default_factory=set)
    quotients: dict[int, Quotient] = dataclasses.field(default_factory=dict)
    sources: dict[Any, CastValue | None] = dataclasses.field(default_factory=dict)
    notes: dict[int, Any] = dataclasses.field(default_factory=dict)

    # Values ---------------------------------------------------------------------------------------

    def constant(self, array: Any) -> CastValue:
        compute = self.settings.policy.compute_dtype
        half = compute if is_half(compute) else np.dtype(np.float16)
        may_be = self.settings.narrows and is_floating_dtype(array.dtype)
        return CastValue(array, is_table=may_be and fits_in_range(array, half))

    def literal(self, literal: jex_core.Literal) -> CastValue:
        dtype = getattr(literal.aval, "dtype", None)
        number = literal.val if dtype is None else np.asarray(literal.val, dtype)
        is_number = np.ndim(number) == 0 and float_dtype(number) is not None
        constant = number[()] if is_number else None
        return CastValue(number, yields=True, constant=constant, is_mask=True)

    def arrays(self, value: CastValue) -> tuple[Any]:
        return (value.array,)

    def filled(self, value: CastValue, arrays: Sequence[Any]) -> CastValue:
        (array,) = arrays
        return value.with_array(array)

    # Programs inside equations --------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[CastValue], branches: Sequence[Any] = ()
    ) -> Sequence[CastValue | None]:
        """Returns the dtypes of the outputs of a loop, of branches, or of a jit with shardings.

        They are the traced dtypes, except that a conditional returns half precision if every branch
        does.
        """
        if equation.primitive.name == "cond":
            outputs = zip(equation.outvars, *(branch.outputs for branch in branches), strict=True)
            return [_merged(variable, found) for variable, *found in outputs]
        if equation.primitive.name in REBUILT:
            return [CastValue(v.aval) for v in equation.outvars]
        return super().merge(equation, values)

    def settled(self, value: CastValue, like: CastValue) -> CastValue:
        return CastValue(cast(value.array, float_dtype(like.array)), narrows=like.narrows)

    def inside(self, equation: Equation, *, reports: bool = True) -> Evaluator:
        inner = copy.copy(self)
        inner.path, inner.held = self.path_of(equation), self.held_by(equation)
        inner.is_whole = self.is_whole or id(equation) in self.regions.measures
        inner.regions, inner.report = NOWHERE, self.report if reports else None
        return inner

    def held_by(self, equation: Equation) -> dict[int, Regions]:
        """Returns the regions of the programs of an equation, by identity."""
        known, held = self.regions.programs, map(id, programs_of(equation))
        return {program: known.get((id(equation), program), NOWHERE) for program in held}

    def saved(self, equation: Equation, values: Values) -> Values:
        """Returns operands to save as residuals: half precision if the body would narrow them."""
        place = self.place_of(equation)
        return [value if place.region else value.narrowed_to(place.compute) for value in values]

    def tracing_rules(self, equation: Equation) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which JAX traces the derivative rules of an equation.

        The trace of the call has ended then, and layers in the rules still return float32.
        """
        scope = self.scope
        if scope is None:
            return contextlib.nullcontext()
        if scope.policy is not None:
            policy = scope.policy.replace(compute_dtype=self.place_of(equation).compute)
            scope = dataclasses.replace(scope, policy=policy)
        return enter(scope)

    # The run --------------------------------------------------------------------------------------

    def run(
        self, jaxpr: OpenJaxpr, consts: Sequence[CastValue], args: Sequence[CastValue]
    ) -> Values:
        regions = None if self.held is None else self.held.get(id(jaxpr))
        if regions is None:
            is_param = [value.yields for value in args]
            regions = NOWHERE
            if self.settings.narrows:
                regions = regions_of(jaxpr, is_param, returns=self.held is None)
        inner = copy.copy(self)
        inner.regions, inner.readers = regions, _readers_of(jaxpr)
        inner.picked, inner.widened = _picked(jaxpr), set()
        divides = any(each.primitive.name == "div" for each in jaxpr.eqns)
        inner.quotients = quotients(jaxpr) if divides else {}
        inner.sources = {source: None for source, _ in inner.quotients.values()}
        for each in jaxpr.eqns:
            if each.primitive.name in FORWARD_ADDITIONS and inner._category(each) == "fp32":
                inner.widened |= {v for v in each.invars if not isinstance(v, jex_core.Literal)}
        args = [inner._noted(v, value) for v, value in zip(jaxpr.invars, args, strict=True)]
        return super(Evaluator, inner).run(jaxpr, consts, args)

    def equation(self, equation: Equation, values: Values) -> Values:
        # Widened where it is first read: a report attributes the cast to that module.
        values = [value.widened_param() if value.is_shared else value for value in values]
        outputs = self._evaluated(equation, values)
        if any(value.is_tangent for value in values):
            for output in outputs:
                output.is_tangent = True
        return [self._noted(v, one) for v, one in zip(equation.outvars, outputs, strict=True)]

    def _quotient(self, equation: Equation, values: Values, place: Place) -> Values | None:
        """Returns a division of two functions of one activation, rounded once; None of others.

        Its gradients in numerator and divisor almost cancel: rounded, they would be off by far.
        """
        source, computed = self.quotients.get(id(equation), (None, None))
        value = self.sources.get(source)
        if computed is None or value is None or value.yields or place.region:
            return None
        halves = [each.narrowed_to(place.compute) for each in (value, *values)]
        is_usual = all(each.is_half and each.dtype == place.compute for each in halves)
        return [CastValue(computed(halves[0].array))] if is_usual else None

    def _noted(self, variable: Any, value: CastValue) -> CastValue:
        """Returns a value with what the program's readers of a variable say about it.

        A param is shared if it is stored in half and read several times. Its readers get it in
        float32 and cast it, so that its cotangents are summed in float32, as those of params that
        are stored in float32.
        """
        if variable in self.sources:
            self.sources[variable] = value
        if variable in self.picked and value.is_half and not value.yields:
            value.is_picked = True  # of the same value, which is widened once for all readers
            return value
        readers = self.readers.get(variable) if value.yields and value.codes is None else None
        if readers is not None and readers.total() > 1 and value.is_half:
            return CastValue(value.array, yields=True, is_shared=True)
        return value

    def _evaluated(self, equation: Equation, values: Values) -> Values:
        name, place = equation.primitive.name, self.place_of(equation)
        category, variables = self._category(equation), equation.outvars
        if jax.dtypes.canonicalize_dtype(np.float64) == np.float64 and not place.is_layer:
            equation, values = without_float64(equation, values)
        layout = widened_layout(equation) if name in REBUILT and not place.is_layer else None
        if layout is not None:
            codes, scales = (value.array for value in values)
            stored = QuantizedArray(codes, scales, layout).astype(place.compute)
            return [CastValue(stored.widened(), yields=True, codes=stored)]
        if (mark := marks.mark_of(equation)) is not None:
            return [_handed_on(mark, values[0], place)]
        if place.is_layer and not is_part(equation):
            return _of_layer(equation, values)
        if category == "control" and name in self.handlers:
            return self.handlers[name](self, equation, values)
        operation = CastOperation(equation, category, place, self.settings.narrows, values)
        quotient = self._quotient(equation, values, place) if category == "promote" else None
        done, outputs = ("widened, then cast", quotient) if quotient else operation.evaluated()
        if self.report is not None:
            self.report.note(self.path_of(equation), name, done, [value.array for value in outputs])
        pairs = zip(variables, outputs, strict=True)
        return [
            value.narrowed_to(place.compute) if value.is_scaled and v in self.picked else value
            for v, value in pairs
        ]

    def name_stack_of(self, equation: Equation) -> Any:
        return marks.without(equation.source_info.name_stack)

    def path_of(self, equation: Equation) -> Path:
        return path_of(str(equation.source_info.name_stack), self.path, marks=True)

    def place_of(self, equation: Equation) -> Place:
        """Returns the dtypes of an equation, by its path and its part in a normalization."""
        place = self.places[self.path_of(equation)]
        if id(equation) in self.regions.applies:
            return place.within("applies")
        is_measure = self.is_whole or id(equation) in self.regions.measures
        return place.within("measures") if is_measure else place

    def _category(self, equation: Equation) -> str:
        """Returns the category of an equation.

        A sum or difference that only float32 operations read runs in float32, such as a softmax's
        ``x - max(x)``: rounded to half, it would be off by as much as `x` itself. It has no
        residual, so float32 costs no memory there. So does ``x * x``, as `square` does: the
        squares of a norm overflow in float16.
        """
        name = equation.primitive.name
        category = self.settings.category(name)
        if name == "reduce_max" and category == "passthrough":
            return "fp32" if equation.invars[0] in self.widened else category
        is_square = name == "mul" and equation.invars[0] is equation.invars[1]
        if category != "promote" or not (name in FORWARD_ADDITIONS or is_square):
            return category
        names = set(self.readers.get(equation.outvars[0], ()))
        reads_wide = {
            reader for reader in names if reader and self.settings.category(reader) == "fp32"
        }
        # The second set is that of log_softmax: the difference of its shifted logits is in float32,
        # like its logarithm.
        return "fp32" if names and names in (reads_wide, READS_LOGITS) else category


def _picked(jaxpr: OpenJaxpr) -> set[Any]:
    """Returns the variables of which a program reads single elements, or the 16-bit numbers."""
    found: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        name, atoms = equation.primitive.name, equation.invars
        if name == "jit":
            body = subprogram(equation, "call").body
            inner = _picked(body)
            atoms = [v for v, inside in zip(atoms, body.invars, strict=True) if inside in inner]
        elif name not in PICKS and not (name in REARRANGES and equation.outvars[0] in found):
            continue
        found.update(atom for atom in atoms if not isinstance(atom, jex_core.Literal))
    return found


def _readers_of(jaxpr: OpenJaxpr) -> dict[Any, collections.Counter[str]]:
    """Returns the primitives that read each variable, and how often.

    "" stands for the caller of the program.
    """
    readers: dict[Any, collections.Counter[str]] = {}
    reads = [(equation.primitive.name, equation.invars) for equation in jaxpr.eqns]
    for name, atoms in (*reads, ("", jaxpr.outvars)):
        for atom in atoms:
            if not isinstance(atom, jex_core.Literal):
                readers.setdefault(atom, collections.Counter())[name] += 1
    return readers


def _merged(variable: Any, outputs: Values) -> CastValue:
    """Returns a value like an output of a conditional.

    It is half precision if every branch returns half precision, otherwise as traced.
    """
    dtype, found = float_dtype(variable.aval), {output.dtype for output in outputs}
    narrows = any(output.narrows for output in outputs)
    if dtype is None:
        return CastValue(variable.aval, narrows=narrows)
    dtype = next(iter(found)) if len(found) == 1 else dtype
    return CastValue(jax.ShapeDtypeStruct(variable.aval.shape, dtype), narrows=narrows)


def _of_layer(equation: Equation, values: Values) -> Values:
    """Evaluates an equation of a layer that obeys a policy itself, in its traced dtypes.

    The casts at its boundary are dropped if the code around it already computes in the layer's
    dtype.
    """
    if equation.primitive.name == "convert_element_type":
        target = np.dtype(equation.params["new_dtype"])
        if values[0].dtype == target:
            return [CastValue(values[0].array)]
    return bound_as_traced(equation, values)


def _handed_on(mark: str, value: CastValue, place: Place) -> CastValue:
    """Evaluates a mark: the value as the code that it is handed to reads it."""
    if mark == marks.KEPT:
        return CastValue(value.as_dtype(F32))
    if value.dtype == F32 or place.compute == F32:
        return CastValue(value.array, narrows=value.dtype == F32 != place.compute)
    return CastValue(cast(value.array, place.compute))

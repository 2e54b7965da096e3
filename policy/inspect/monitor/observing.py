"""Evaluates the program of a step once more, and measures values that leave its modules."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax.numpy as jnp
from jax import lax

from policy.core.arrays import axes_of_leaves
from policy.inspect.monitor import nonfinite
from policy.inspect.monitor.nonfinite import Scan
from policy.inspect.monitor.snapshot import Kind, NumbersPlace
from policy.inspect.monitor.step import TrainStep
from policy.inspect.monitor.step_log import StepLog
from policy.inspect.monitor.tensor_statistics import statistics_of
from policy.inspect.monitor.updates import ArrayRead, is_lost, reads_of
from policy.inspect.traced.authors import source_of
from policy.inspect.traced.module_values import (
    ModuleValueInterpreter,
    ValueOrigin,
    passes,
    places_around,
)
from policy.inspect.traced.placed import ModulePass, PlacedValue
from policy.inspect.traced.upcast import dtype_of
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    bind,
    equations_within,
    opened,
    programs_of,
    subprograms,
)
from policy.programs.primitives import EXACT, HOST, INLINED, MOVES_DATA
from policy.programs.rewriting.interpreter import CONTROL_FLOW

_PASSES = ("forward", "backward")


@dataclasses.dataclass(eq=False)
class _Origin(ValueOrigin):
    """The origin of a value.

    Its `code` is one of `nonfinite.FinitenessCodes`, None before it is known. `is_infinite` tells
    whether it was moved from a constant with infinities or NaN.
    """

    code: frozenset[int] | None = None
    is_infinite: bool = False


def observed(step: TrainStep, log: StepLog) -> Callable[..., dict[int, Any]]:
    """Returns the function of a step's arrays that measures them, and the values in the step."""
    body, consts = opened(step.jaxpr)
    params = {param.leaf for param in step.params}

    def run(*arrays: Any) -> dict[int, Any]:
        observer = Observer(log, step)
        for i, array in enumerate(arrays):
            kind: Kind = "param" if i in params else "input"
            if (i in params or i not in step.carried) and is_measured(array.dtype):
                observer.measure_leaf(kind, i, array)
        given = [PlacedValue([array], _Origin(ModulePass())) for array in arrays]
        observer.body(body, list(map(observer.constant, consts)), given)
        codes = nonfinite.FinitenessCodes()
        log.entered = log.new_key(NumbersPlace())
        observer.notes[log.entered] = codes.worst([codes.of(array) for array in arrays])
        return observer.notes

    return run


class Observer(ModuleValueInterpreter):
    """Evaluates a program, and measures values that leave modules, gradients and updates.

    Args:
      log: the record to write.
      step: the step.
    """

    origin_type = _Origin

    def __init__(self, log: StepLog, step: TrainStep):
        super().__init__()
        self.log, self.paths = log, step.paths
        self.reads = reads_of(step.graph, step.params)
        # the passes that read each output; others are new state, or residuals of the other pass
        state = {*step.carried.values()}
        self.readers = [() if i in state else ("forward",) for i in range(step.outputs)]
        self.passes: dict[Any, set[str]] = {}  # by the variables of the program that runs
        self.scans: tuple[Scan, ...] = ()
        self.flags: list[nonfinite.Flag] = []
        self.finite = nonfinite.FinitenessCodes()

    def inside(self, equation: Equation) -> Self:
        inner = super().inside(equation)
        carried = max((one.carried for one in subprograms(equation)), default=0)
        inner.readers = [
            _PASSES if i < carried else tuple(self.passes[variable])
            for i, variable in enumerate(equation.outvars)
        ]
        if equation.primitive.name == "scan":
            scan = Scan(not _differentiates(equation), bool(equation.params["reverse"]))
            inner.scans = (*self.scans, scan)
        return inner

    def tracing(self, program: Any) -> Self:
        inner = super().tracing(program)
        inner.flags, inner.finite = [], nonfinite.FinitenessCodes()
        return inner

    def run(
        self, jaxpr: OpenJaxpr, consts: Sequence[PlacedValue], args: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        self.passes = collections.defaultdict(set)
        for equation in jaxpr.eqns:
            for atom in equation.invars:
                if not hasattr(atom, "val"):
                    self.passes[atom].add(self.place_of(equation).direction)
        for atom, readers in zip(jaxpr.outvars, self.readers, strict=False):
            if not hasattr(atom, "val"):
                self.passes[atom].update(readers)
        return super().run(jaxpr, consts, args)

    # Equations ------------------------------------------------------------------------------------

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        name = equation.primitive.name
        if name in HOST and (equation.effects or not equation.outvars):
            return _without_effects(equation)
        place = self.place_of(equation)
        reads = self.reads.arrays.get((self.chain, id(equation)), ())
        params = {1 - read.operand for read in reads if read.kind == "update"}
        if name not in INLINED:
            for i, (value, atom) in enumerate(zip(values, equation.invars, strict=True)):
                if i not in params:
                    self._read(value, place, dtype_of(atom))
        if name in CONTROL_FLOW:
            return CONTROL_FLOW[name](self, equation, values)
        arrays = [value.arrays[0] for value in values]
        outputs = bind(equation, arrays)
        if all(hasattr(atom, "val") for atom in equation.invars):
            outputs = lax.optimization_barrier(outputs)  # XLA would fold statistics of constants
        for read in reads:
            self._measure_read(read, arrays, outputs)
        operation, line = self.made_by(equation, place, values)
        code = self._code_of_results(equation, values, outputs, (operation, line))
        is_infinite = name in EXACT | MOVES_DATA and any(map(_is_infinite, values))
        origin = _Origin(place, operation, line, code=code, is_infinite=is_infinite)
        return [PlacedValue([output], dataclasses.replace(origin)) for output in outputs]

    def _code_of_results(
        self,
        equation: Equation,
        values: Sequence[PlacedValue],
        outputs: Sequence[Any],
        made_by: tuple[str, str],
    ) -> Any:
        """Returns the code of an equation's results, and flags an operation that may make it."""
        if not any(is_measured(dtype_of(variable)) for variable in equation.outvars):
            return frozenset()
        finite = [value for value in values if not _is_infinite(value)]
        has_constant = len(finite) < len(values)
        if nonfinite.keeps_finite(equation) and not has_constant:
            return frozenset[int]().union(*map(self._code, values))
        after = frozenset[int]().union(*map(self.finite.of, outputs))
        if equation.primitive.name in EXACT | MOVES_DATA:
            return after
        # an infinite constant such as a weight of a loss makes its result infinite
        before = frozenset[int]().union(*map(self._code, finite))
        origin = _Origin(self.place_of(equation), *made_by)
        if origin.primitive == "integer_pow" and equation.params.get("y", 0) < 0:
            origin.primitive = "div"
        origin.primitive += " of an infinite constant" * has_constant
        leaf = self.reads.leaves.get((self.chain, id(equation)))
        self._flag(origin, dtype_of(equation.outvars[0]), after, before, leaf)
        return after

    def _flag(
        self, origin: _Origin, dtype: Any, after: Any, before: Any, leaf: int | None = None
    ) -> None:
        """Flags an operation whose results may be less finite than its operands, by their codes."""
        place = origin.place
        if place.direction == "again":
            return
        where = place.path if leaf is None else self.paths[leaf]
        direction = place.direction if leaf is None else "update"
        self.flags.append(nonfinite.Flag(len(self.log.operations), after, before))
        line = origin.source.partition(" (")[0]
        self.log.operations.append((where, direction, origin.primitive, line, str(dtype)))

    def _code(self, value: PlacedValue) -> frozenset[int]:
        if value.origin is None or value.origin.code is None:
            value.origin = value.origin or _Origin(ModulePass())
            value.origin.code = self.finite.of(value.arrays[0])
        return value.origin.code

    # Measurements ---------------------------------------------------------------------------------

    def _read(self, value: PlacedValue, reader: ModulePass, dtype: Any) -> None:
        """Measures a value that leaves modules for the first time."""
        origin, (array,) = value.origin, value.arrays
        left = places_around(origin.place, reader.path) if passes(value, reader) else {}
        if not left or not is_measured(dtype):
            return
        if origin.measurement is None:
            origin.measurement = self._new_key(array)
            self.notes[origin.measurement] = statistics_of(array, self._axes_of(array))
        kind: Kind = "cotangent" if origin.place.direction == "backward" else "activation"
        for place in left:
            line = origin.source.partition(" (")[0]
            self.log.add(place.path, kind, dtype, line, origin.measurement)

    def _axes_of(self, array: Any) -> tuple[str, ...]:
        """Returns the mesh axes around over which devices have their own parts of an array."""
        (own,) = axes_of_leaves([array], self.axes)
        return tuple(axis for axis in self.axes if axis in own)

    def _new_key(self, array: Any) -> int:
        """Returns a key for the numbers of an array."""
        parts = 2 if jnp.issubdtype(array.dtype, jnp.complexfloating) else 1
        devices = math.prod(map(lax.axis_size, self._axes_of(array)))
        return self.log.new_key(NumbersPlace(self.scans, parts * array.size * devices))

    def measure_leaf(self, kind: Kind, leaf: int, array: Any, lost: Any = None) -> None:
        """Measures an array of a leaf of the arguments."""
        if (kind, leaf) not in self.log.leaves:
            self.log.leaves[kind, leaf] = self._new_key(array)
            self.log.add(self.paths[leaf], kind, array.dtype, "", self.log.leaves[kind, leaf])
        self.notes[self.log.leaves[kind, leaf]] = statistics_of(array, self._axes_of(array), lost)

    def _measure_read(self, read: ArrayRead, arrays: Sequence[Any], outputs: Sequence[Any]) -> None:
        array, lost = arrays[read.operand], None
        if read.kind == "update":
            array = jnp.broadcast_to(array, outputs[0].shape)
            lost = is_lost(read, arrays[1 - read.operand], outputs[0], array)
        self.measure_leaf(read.kind, read.leaf, array, lost)

    # Bodies ---------------------------------------------------------------------------------------

    def body(
        self, jaxpr: OpenJaxpr, consts: Sequence[PlacedValue], args: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        """Runs a body, whose measurements are known only inside it."""
        outputs = super().body(jaxpr, consts, list(map(self._entering, args)))
        for value, atom, readers in zip(outputs, jaxpr.outvars, self.readers, strict=False):
            if value.origin is None:
                continue
            if value.origin.place.direction in readers:
                reader = self.place._replace(direction=value.origin.place.direction)
                self._read(value, reader, dtype_of(atom))
            if value.origin.primitive and is_measured(dtype_of(atom)):  # taken to be finite so far
                after, before = self.finite.of(value.arrays[0]), self._code(value)
                self._flag(value.origin, dtype_of(atom), after, before)
        if self.flags:
            key = self.log.new_key(NumbersPlace(self.scans))
            self.log.firsts.append(key)
            first = nonfinite.first_made(self.flags, self.finite)
            axes = self._axes_of(first)
            self.notes[key] = lax.pmax(first, axes) if axes else first
        return [PlacedValue(value.arrays, _without_code(value.origin)) for value in outputs]

    def _entering(self, value: PlacedValue) -> PlacedValue:
        origin = _Origin(self.place) if value.origin is None else _without_code(value.origin)
        return PlacedValue(value.arrays, origin)


def _without_code(origin: Any) -> Any:
    """Returns an origin for another trace, which has no traced values of this one."""
    return origin and dataclasses.replace(origin, code=None)


def _is_infinite(value: PlacedValue) -> bool:
    """Returns whether a value is a constant with infinities or NaN, or was moved from one.

    A comparison with such a constant is none.
    """
    array = value.arrays[0]
    is_moved = value.origin is not None and value.origin.is_infinite and is_measured(array.dtype)
    return is_moved or nonfinite.is_infinite_constant(array)


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

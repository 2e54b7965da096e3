"""A program with its jitted functions inlined: steps, and the makers and readers of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy.programs import primitives
from policy.programs.dtypes import is_floating_dtype
from policy.programs.jaxprs import Equation, OpenJaxpr, bind, subprogram
from policy.programs.rewriting.interpreter import has_options

_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(primitives.REARRANGES, lambda _, x: x),
    "convert_element_type": lambda _, x: x,
    "stop_gradient": lambda _, x: x,
    "sqrt": lambda _, x: np.sqrt(x),
    "rsqrt": lambda _, x: 1 / np.sqrt(x),
    "neg": lambda _, x: -x,
    "mul": lambda _, x, y: x * y,
    "div": lambda _, x, y: np.divide(x, y),
    "integer_pow": lambda params, x: x ** params["y"],
    "pow": lambda _, x, y: x**y,
}


@dataclasses.dataclass(eq=False)
class Inner:
    """A value of a program inside an equation; `array` is that of a constant."""

    aval: Any
    array: Any = None


@dataclasses.dataclass(eq=False)
class InlinedStep:
    """An equation, its operands and results, and the equation of the program that it stands in."""

    equation: Equation
    inputs: list[Any]
    outputs: list[Any]
    around: Equation

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def is_outer(self) -> bool:
        return self.equation is self.around


class InlinedProgram:
    """The steps of a program, in the order in which they run."""

    def __init__(self, jaxpr: OpenJaxpr):
        self.jaxpr = jaxpr
        self.steps: list[InlinedStep] = []
        self.makers: dict[Any, InlinedStep] = {}
        self.readers: dict[Any, list[int]] = {}
        self._inner: dict[Any, Any] = {}  # results of calls, and the values inside that they are
        self._names: dict[Any, Any] = {}  # the reverse
        for equation in jaxpr.eqns:
            self._add(equation, list(equation.invars), list(equation.outvars), equation)

    def _add(self, equation: Equation, inputs: list[Any], outputs: list[Any], around: Any) -> None:
        inputs = [x if is_literal(x) else self._inner.get(x, x) for x in inputs]
        if not _is_inlined(equation):
            step = InlinedStep(equation, inputs, outputs, around)
            for x in inputs:
                if not is_literal(x):
                    self.readers.setdefault(x, []).append(len(self.steps))
            self.makers |= dict.fromkeys(outputs, step)
            self.steps.append(step)
            return
        program = subprogram(equation, "call")
        values: dict[Any, Any] = dict(zip(program.body.invars, inputs, strict=True))
        for variable, array in zip(program.body.constvars, program.consts, strict=True):
            values[variable] = Inner(variable.aval, array)

        def read(atom: Any) -> Any:
            return atom if is_literal(atom) else values[atom]

        for inner in program.body.eqns:
            made = [Inner(variable.aval) for variable in inner.outvars]
            self._add(inner, list(map(read, inner.invars)), list(made), around)
            values |= {v: self._inner.get(x, x) for v, x in zip(inner.outvars, made, strict=True)}
        for variable, atom in zip(outputs, map(read, program.body.outvars), strict=True):
            self._inner[variable] = atom
            if not isinstance(variable, Inner) and isinstance(atom, Inner):
                self._names.setdefault(atom, variable)

    def number(self, atom: Any) -> float | None:
        """Returns the number that a value is in all places, or None."""
        if is_literal(atom) or getattr(atom, "array", None) is not None:
            number = np.asarray(atom.val if is_literal(atom) else atom.array)
            is_number = number.ndim == 0 and number.dtype.kind in "fiuV"
            return float(number) if is_number else None
        maker = self.makers.get(atom)
        if maker is None or maker.name not in _NUMBERS:
            return None
        if maker.name not in primitives.REARRANGES and not is_floating_dtype(
            maker.outputs[0].aval.dtype
        ):
            return None  # integers divide in another way
        numbers = [self.number(x) for x in maker.inputs]
        if any(number is None for number in numbers):
            return None
        with np.errstate(all="ignore"):
            return float(_NUMBERS[maker.name](maker.params, *numbers))

    def leaves(self, value: Any) -> set[Any] | None:
        """Returns the variables of the program that a value of an inner one is computed from, or
        None.
        """
        found, waiting = set(), [value]
        while waiting:
            x = waiting.pop()
            if is_literal(x) or getattr(x, "array", None) is not None:
                continue
            name = self._names.get(x, x)
            if not isinstance(name, Inner):
                found.add(name)
            elif x in self.makers:
                waiting += self.makers[x].inputs
            else:
                return None
        return found

    def computed(self, value: Any, read: Callable[[Any], Any]) -> Any:
        """Evaluates a value of an inner program from its `leaves`."""
        name = self._names.get(value, value) if not is_literal(value) else value
        if is_literal(name):
            return np.asarray(name.val, name.aval.dtype)
        if not isinstance(name, Inner):
            return read(name)
        if name.array is not None:
            return name.array
        step = self.makers[name]
        results = bind(step.equation, [self.computed(x, read) for x in step.inputs])
        return results[step.outputs.index(name)]

    def depends_on_arguments(self, value: Any) -> bool:
        """Returns whether a value is computed from an argument of the program."""
        waiting, seen = [value], set()
        while waiting:
            x = waiting.pop()
            x = x if is_literal(x) else self._inner.get(x, x)
            if is_literal(x) or x in seen:
                continue
            seen.add(x)
            if x in self.makers:
                waiting += self.makers[x].inputs
            elif x in self.jaxpr.invars:
                return True
        return False


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def _is_inlined(equation: Equation) -> bool:
    name = equation.primitive.name
    return name in (*primitives.CALLS, "jit") and not has_options(equation)

"""The flow of casts to float32 to the operands of matmuls and elementwise operations, and the marks
of those on a program, which decide how autocast evaluates them.

A program that is traced in compute_dtype shows each cast as an equation of its own.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex_core

from policy.autocasting.source_lines import (
    CAST,
    GIVEN,
    PROMOTED,
    cast_by,
    names_dtypes,
    normalization_of,
    writers,
)
from policy.programs import marks, primitives
from policy.programs.dtypes import float_dtype, is_half
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    opened,
    programs_of,
    runs_any,
    subprograms,
    with_equations,
    with_subprograms,
)

_SUMS = re.compile("reduce|cum|arg|sort")
_MOVES = primitives.MOVES_DATA | primitives.BROADCASTS | {"pad"}
_ELEMENTWISE = primitives.PRODUCTS | primitives.FORWARD_ADDITIONS | primitives.BOUNDED | {"gather"}

# The operands of an operation beside CAST, GIVEN and PROMOTED: compute_dtype, computed from a cast
# elementwise or with a sum, float32 operands of a derivative rule, inputs of layers that were cast,
# and others.
HALF, DERIVED, REDUCED, RECEIVED, OTHER = "half", "derived", "reduced", "received", "other"
ASKED = "asked"
NARROW = {HALF, PROMOTED, GIVEN}


class Operations(list[Equation]):
    """The matmuls of a program in the order of their calls, but for those of layers.

    Attributes:
      operands: what their operands are.
      lines: the innermost equations that lines of a user's run: they, or calls around them.
      around: the one of the call under way, or None.
      calls: the equations of calls with matmuls inside, whose lines are not those of the caller.
      with_rules: the equations of functions with derivative rules of their own and matmuls.
      casting: the identities of equations whose programs cast an operand of each matmul in them.
      casts: the code of functions that cast to float32.
      elementwise: the elementwise equations, their lines, and whether lines cast all operands.
      normalizations: squares of Flax's normalizations in compute_dtype.
      repeated: the results of broadcasts.
      layers: the matmuls of layers.
      of_layers: matmuls of layers that obey the policy, whose inputs lines cast to float32.
      kept: the matmuls that make results of modules whose own policy returns them unrounded.
    """

    def __init__(self, jaxpr: Any, *, of_casts: bool = False):
        super().__init__()
        self.operands: list[list[str]] = []
        self.lines: list[Equation] = []
        self.around: Equation | None = None
        self.calls: list[Equation] = []
        self.with_rules: list[Equation] = []
        self.casting: set[int] = set()
        self.casts: set[Any] = set()
        self.elementwise: list[tuple[Equation, Equation, bool]] = []
        self.normalizations: list[Equation] = []
        self.repeated: set[Any] = set()
        self.layers: list[Equation] = []
        self.of_layers: list[Equation] = []
        self.kept: list[Equation] = []
        body, _ = opened(jaxpr)
        wide = RECEIVED if of_casts else OTHER
        given = [_of(v.aval) for v in body.invars]
        self.run(body, [wide if each == OTHER else each for each in given])

    def run(self, body: OpenJaxpr, given: Sequence[str]) -> list[str]:
        """Notes the matmuls of a program, and returns what its outputs are."""
        facts = {v: _of(v.aval) for v in body.constvars} | dict(
            zip(body.invars, given, strict=True)
        )

        def read(atom: Any) -> str:
            return "" if isinstance(atom, jex_core.Literal) else facts[atom]

        kept: list[Any] = []
        for equation in body.eqns:
            results = self._results(equation, list(map(read, equation.invars)))
            facts.update(zip(equation.outvars, results, strict=True))
            kept += equation.invars if marks.mark_of(equation) == marks.KEPT else ()
        self.kept += _defining_matmuls(body, kept) if kept else ()
        return list(map(read, body.outvars))

    def _results(self, equation: Equation, values: list[str]) -> list[str]:
        results = [_of(v.aval) for v in equation.outvars]
        name = equation.primitive.name
        if is_of_layer(equation):
            return self._results_of_layer(equation, values, results)
        if rule_of(equation) is not None and any(
            runs_any(program, primitives.MATMULS) for program in programs_of(equation)
        ):
            self.with_rules.append(equation)
        inside, before = subprograms(equation), len(self)
        around = self.around
        line = equation if around is None or writers(equation) else around
        self.around = line
        for one in inside:
            if one.is_run and one.operands is not None:
                made = self.run(one.body, one.given(values))
                results = made if len(made) == len(results) else results
        self.around = around
        if inside:
            self.calls += [equation] if len(self) > before else []
            if all(CAST in operands for operands in self.operands[before:]):
                self.casting.add(id(equation))
            return results
        if name in primitives.MATMULS:
            self.append(equation)
            self.operands.append(values)
            self.lines.append(line)
            is_cast = {*values} <= {CAST, DERIVED, REDUCED} and {*values} != {REDUCED}
            return [DERIVED] if is_cast and results == [OTHER] else results
        if name in _ELEMENTWISE and results[0]:
            self.elementwise.append((equation, line, set(_scaled(equation, values)) == {CAST}))
        if name in primitives.POWERS and results == [HALF] and normalization_of(equation):
            self.normalizations.append(equation)
        if set(results) != {OTHER} or marks.mark_of(equation) is not None:
            return results
        if name in primitives.BROADCASTS:
            self.repeated.add(equation.outvars[0])
        result = self._of_float32(equation, values)
        if result == CAST:
            self.casts |= writers(equation)
        return [result] * len(results)

    def _of_float32(self, equation: Equation, values: list[str]) -> str:
        """Returns what a float32 result of an equation is.

        It is computed from a cast if an operand is that was not broadcast, in ``h * d`` and
        ``h + b`` that is `h`, and no other is in compute_dtype.
        """
        name, floats = equation.primitive.name, [value for value in values if value]
        if name == "convert_element_type" and floats == [HALF]:
            return cast_by(equation, self.around)
        if name in _MOVES:
            moved = floats if len(set(floats)) == 1 else _scaled(equation, values)
            if len(set(moved)) == 1:
                return moved[0]
        if name in primitives.PRODUCTS and _scaled(equation, values) == [CAST]:
            return CAST  # by a number
        pairs = zip(values, equation.invars, strict=True)
        whole = [v for v, atom in pairs if v and _is_array(atom) and atom not in self.repeated]
        is_cast = not {CAST, DERIVED, REDUCED}.isdisjoint(whole or floats)
        if not is_cast or set(whole or floats) - {CAST, DERIVED, REDUCED, OTHER}:
            return OTHER
        return REDUCED if REDUCED in floats or _SUMS.match(name) else DERIVED

    def _results_of_layer(
        self, equation: Equation, values: list[str], results: list[str]
    ) -> list[str]:
        """Notes a matmul whose input was cast to float32 in front of its layer."""
        name, is_asked = equation.primitive.name, not {CAST, ASKED}.isdisjoint(values[:1])
        if name in primitives.MATMULS:
            self.layers.append(equation)
            self.of_layers += [equation] if is_asked else []
        moves = name in primitives.CASTS | primitives.MOVES_DATA
        return [ASKED] if is_asked and moves and len(results) == 1 else results


def _of(aval: Any) -> str:
    dtype = float_dtype(aval)
    return "" if dtype is None else HALF if is_half(dtype) else OTHER


def _scaled(equation: Equation, values: Sequence[str]) -> list[str]:
    """Returns what the operands of an equation are that are no numbers."""
    pairs = zip(values, equation.invars, strict=True)
    return [value for value, atom in pairs if value and _is_array(atom)]


def _is_array(atom: Any) -> bool:
    return bool(getattr(atom.aval, "shape", ()))


def is_of_layer(equation: Equation) -> bool:
    stack = equation.source_info.name_stack.stack
    return any(getattr(scope, "name", None) == marks.LAYER for scope in stack)


def rule_of(equation: Equation) -> Any:
    """Returns the function that traces the derivative rule of an equation, or None."""
    params = equation.params
    rule = params.get("jvp_jaxpr_fun") or params.get("fwd_jaxpr_thunk")
    return getattr(rule, "f", rule)


def speaks_backward(equation: Equation) -> bool:
    """Returns whether a function's backward rule, which no line around it names, names dtypes."""
    code = getattr(getattr(equation.params.get("bwd"), "f", None), "__code__", None)
    return code is not None and names_dtypes(code)


def _defining_matmuls(body: OpenJaxpr, atoms: list[Any]) -> Iterator[Equation]:
    """Yields the matmuls that define some values, up to elementwise operations and moves."""
    defining = {variable: equation for equation in body.eqns for variable in equation.outvars}
    seen: set[int] = set()
    while atoms:
        atom = atoms.pop()
        equation = None if isinstance(atom, jex_core.Literal) else defining.get(atom)
        if equation is None or id(equation) in seen or marks.mark_of(equation) is not None:
            continue
        seen.add(id(equation))
        if equation.primitive.name in primitives.MATMULS:
            yield equation
        elif equation.primitive.name in primitives.ELEMENTWISE | primitives.MOVES_DATA:
            atoms += equation.invars


def with_marks(jaxpr: Any, said: dict[int, str], done: dict[int, Any]) -> Any:
    """Returns a program whose matmuls carry the marks of `said`, by their identities."""
    body: Any = opened(jaxpr)[0]
    if id(body) in done:
        return done[id(body)]
    equations = []
    for equation in body.eqns:
        each: Any = equation
        inside = subprograms(each)
        if inside:
            programs = [with_marks(one.jaxpr, said, done) for one in inside]
            if any(new is not one.jaxpr for new, one in zip(programs, inside, strict=True)):
                each = each.replace(params=with_subprograms(each, programs))
        if mark := said.get(id(equation)):
            info = each.source_info
            stack = info.name_stack.extend(mark)
            each = each.replace(source_info=info.replace(name_stack=stack))
        equations.append(each)
    is_same = all(map(operator.is_, equations, body.eqns))
    result = jaxpr if is_same else with_equations(jaxpr, equations)
    done[id(body)] = result
    return result

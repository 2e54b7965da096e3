"""Search of a gradient program for half-precision sums that reach its results only by rounding.

A weight's gradient is the result of a matmul in half precision that JAX widens afterwards: the
accumulator is rounded to half, transposed, added to that of other uses, and cast to float32. The
search walks from the gradients back over such casts and over operations that move, add or scale
numbers, to the matmuls, convolutions, sums and casts that rounded them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, Var

from policy._jaxpr.dtypes import F32, float_dtype
from policy._jaxpr.interpreter import equations_of
from policy._jaxpr.primitives import (
    ANNOTATES,
    LINEAR_IN_ALL,
    MATMULS,
    MOVES_COTANGENTS,
    ONE_FOR_EACH,
    PRODUCTS,
    RUNS_PROGRAMS,
    WIDENABLE_SUMS,
)
from policy._jaxpr.protocols import Equation, OpenJaxpr
from policy._jaxpr.scope_names import EXCHANGE, innermost_scope
from policy._jaxpr.subprograms import opened, programs_of, subprograms

HANDS_ON = MOVES_COTANGENTS | ANNOTATES
"""Hand on the numbers of their first operand, in its dtype."""


@dataclasses.dataclass(frozen=True)
class RoundedSums:
    """The variables of a gradient program that hold sums which a gradient widens.

    Attributes:
      rounded: results of matmuls, convolutions, sums and casts that round to half precision.
      widened: results, of equations that hold programs, that are float32 where half precision was
        traced.
    """

    rounded: frozenset[Var]
    widened: frozenset[Var]

    @classmethod
    def of(cls, jaxpr: Any, is_gradient: Sequence[bool]) -> RoundedSums:
        """Searches a program; `is_gradient` says which of its results are gradients."""
        search = _Search()
        search.reached(opened(jaxpr)[0], is_gradient)
        return cls(frozenset(search.rounded), frozenset(search.widened))

    def within(self, jaxpr: OpenJaxpr) -> RoundedSums:
        """Returns those of a program inside this one, and of the programs inside of it."""
        inside = set(_results_of(jaxpr))
        return RoundedSums(self.rounded & inside, self.widened & inside)


@functools.lru_cache(maxsize=4096)
def _results_of(jaxpr: OpenJaxpr) -> frozenset[Any]:
    """Returns the variables that the equations of a program, and of those inside of it, define."""
    found = {variable for equation in equations_of(jaxpr) for variable in equation.outvars}
    inner = [one for equation in equations_of(jaxpr) for one in programs_of(equation)]
    return frozenset(found.union(*map(_results_of, inner)))


class _Search:
    """Collects the sums of `RoundedSums`."""

    def __init__(self) -> None:
        self.rounded: set[Any] = set()
        self.widened: set[Any] = set()
        self._known: dict[tuple[OpenJaxpr, tuple[bool, ...]], list[bool]] = {}

    def reached(self, jaxpr: OpenJaxpr, is_wanted: Sequence[bool]) -> list[bool]:
        """Returns for each argument of a program whether its numbers reach a wanted result."""
        key = (jaxpr, tuple(is_wanted))
        if key not in self._known:
            wanted = {
                atom
                for atom, one in zip(jaxpr.outvars, is_wanted, strict=True)
                if one and not isinstance(atom, Literal)
            }
            for equation in reversed(equations_of(jaxpr)):
                if not wanted.isdisjoint(equation.outvars):
                    found = [equation.invars[i] for i in self._operands(equation, wanted)]
                    wanted.update(atom for atom in found if not isinstance(atom, Literal))
            self._known[key] = [variable in wanted for variable in jaxpr.invars]
        return self._known[key]

    def _operands(self, equation: Equation, wanted: set[Any]) -> Sequence[int]:
        """Returns the operands of an equation whose numbers its wanted results hold, by index."""
        name = equation.primitive.name
        if name in RUNS_PROGRAMS:
            return self._of_programs(equation, [v in wanted for v in equation.outvars])
        if name in ONE_FOR_EACH:
            is_asked_for = innermost_scope(equation) == EXCHANGE  # in this dtype
            pairs = enumerate(equation.outvars)
            return [i for i, result in pairs if result in wanted and not is_asked_for]
        result, operands = equation.outvars[0], equation.invars
        dtype = float_dtype(result.aval)
        if dtype is None:
            return ()
        if name == "convert_element_type":
            return self._of_cast(equation)
        is_matmul = name in MATMULS and all(map(_is_half, operands[:2]))
        if name in HANDS_ON or sums_nothing(equation):
            return (0,)
        if _is_half(result) and (is_matmul or name in WIDENABLE_SUMS):
            return self._round(equation)
        is_linear = name in LINEAR_IN_ALL or (name in PRODUCTS and not _is_half(result))
        return [i for i, x in enumerate(operands) if is_linear and float_dtype(x.aval) == dtype]

    def _of_cast(self, equation: Equation) -> Sequence[int]:
        """Follows casts to wider dtypes, and notes those that round to half."""
        before, after = float_dtype(equation.invars[0].aval), float_dtype(equation.outvars[0].aval)
        if before is None or after is None:
            return ()
        if before.itemsize > after.itemsize and _is_half(equation.outvars[0]):
            self._round(equation)
        return () if before.itemsize == after.itemsize and before != after else (0,)

    def _round(self, equation: Equation) -> Sequence[int]:
        self.rounded.add(equation.outvars[0])
        return ()

    def _of_programs(self, equation: Equation, is_wanted: list[bool]) -> Sequence[int]:
        found: set[int] = set()
        for program in subprograms(equation):
            if program.operands is None or program.role == "cond":
                continue
            wanted = list(is_wanted)
            while True:  # a loop carries from turn to turn
                reached = self.reached(program.body, wanted)
                carried = [
                    a or b
                    for a, b in zip(wanted[: program.carried], reached[program.carry], strict=True)
                ]
                if carried == wanted[: program.carried]:
                    break
                wanted[: program.carried] = carried
            found |= {i for i, one in zip(program.operands, reached, strict=True) if one}
            is_wanted = wanted
        self.widened.update(
            variable for variable, one in zip(equation.outvars, is_wanted, strict=True) if one
        )
        return sorted(found)


def sums_nothing(equation: Equation) -> bool:
    """Returns whether an equation sums over axes of size 1: it transposes a broadcast of these."""
    return (
        equation.primitive.name == "reduce_sum"
        and equation.invars[0].aval.size == equation.outvars[0].aval.size
    )


def _is_half(atom: Any) -> bool:
    dtype = float_dtype(atom.aval)
    return dtype is not None and dtype.itemsize < F32.itemsize

"""Search of a gradient program for half-precision sums that reach its results only by rounding.

JAX adds up the cotangents of a value in that value's dtype, and a matmul in half precision rounds
its accumulator. The search walks from the gradients back over casts and over operations that move,
add or scale numbers, to the additions over the uses of a weight, the sums over its elements, and
the casts that round to half precision; for accumulators also to matmuls and convolutions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, Var

from policy.programs.dtypes import float_dtype, holds_half
from policy.programs.jaxprs import Equation, OpenJaxpr, opened, programs_of, subprograms
from policy.programs.primitives import (
    ANNOTATES,
    LINEAR_IN_ALL,
    MATMULS,
    MOVES_COTANGENTS,
    ONE_FOR_EACH,
    PRODUCTS,
    RUNS_PROGRAMS,
    WIDENABLE_SUMS,
)
from policy.programs.rewriting.interpreter import equations_of

HANDS_ON = MOVES_COTANGENTS | ANNOTATES
"""Hand on the numbers of their first operand, in its dtype."""


@dataclasses.dataclass(frozen=True)
class RoundedSums:
    """The variables of a gradient program that hold sums which a gradient widens.

    Attributes:
      accumulators: whether matmuls and convolutions are among the sums.
      rounded: results of sums, products and casts that round to half precision, and, where asked
        for, of matmuls and convolutions.
      widened: results, of equations that hold programs, that are float32 where half precision was
        traced.
    """

    accumulators: bool
    rounded: frozenset[Var]
    widened: frozenset[Var]

    @classmethod
    def of(cls, jaxpr: Any, is_gradient: Sequence[bool], *, accumulators: bool) -> RoundedSums:
        """Searches a program.

        Args:
          jaxpr: the program, whose arguments are the weights.
          is_gradient: for each result, whether it is a gradient.
          accumulators: whether to search for matmuls and convolutions too.
        """
        search, body = _Search(accumulators), opened(jaxpr)[0]
        search.reached(body, is_gradient, [True] * len(body.invars))
        return cls(accumulators, frozenset(search.rounded), frozenset(search.widened))

    def within(self, jaxpr: OpenJaxpr) -> RoundedSums:
        """Returns those of a program inside this one, and of the programs inside of it."""
        inside = set(_results_of(jaxpr))
        return dataclasses.replace(
            self, rounded=self.rounded & inside, widened=self.widened & inside
        )


@functools.lru_cache(maxsize=4096)
def _results_of(jaxpr: OpenJaxpr) -> frozenset[Any]:
    """Returns the variables that the equations of a program, and of those inside of it, define."""
    found = {variable for equation in equations_of(jaxpr) for variable in equation.outvars}
    inner = [one for equation in equations_of(jaxpr) for one in programs_of(equation)]
    return frozenset(found.union(*map(_results_of, inner)))


class _Search:
    """Collects the sums of `RoundedSums`.

    Of each program that it enters, it knows which variables are computed from weights alone: a
    cotangent that one of these multiplies is searched further.
    """

    def __init__(self, accumulators: bool) -> None:
        self.accumulators = accumulators
        self.rounded: set[Any] = set()
        self.widened: set[Any] = set()
        self._known: dict[Any, list[bool]] = {}

    def reached(
        self, jaxpr: OpenJaxpr, is_wanted: Sequence[bool], is_weight: Sequence[bool]
    ) -> list[bool]:
        """Returns for each argument of a program whether its numbers reach a wanted result."""
        key = (jaxpr, tuple(is_wanted), tuple(is_weight))
        if key not in self._known:
            weights = _of_weights(jaxpr, is_weight)
            wanted = {
                atom
                for atom, one in zip(jaxpr.outvars, is_wanted, strict=True)
                if one and not isinstance(atom, Literal)
            }
            for equation in reversed(equations_of(jaxpr)):
                if not wanted.isdisjoint(equation.outvars):
                    found = [equation.invars[i] for i in self._operands(equation, wanted, weights)]
                    wanted.update(atom for atom in found if not isinstance(atom, Literal))
            self._known[key] = [variable in wanted for variable in jaxpr.invars]
        return self._known[key]

    def _operands(self, equation: Equation, wanted: set[Any], weights: set[Any]) -> Sequence[int]:
        """Returns the operands of an equation whose numbers its wanted results hold, by index."""
        name = equation.primitive.name
        if name in RUNS_PROGRAMS:
            is_wanted = [v in wanted for v in equation.outvars]
            return self._of_programs(equation, is_wanted, weights)
        if name in ONE_FOR_EACH:
            return [i for i, result in enumerate(equation.outvars) if result in wanted]
        result, operands = equation.outvars[0], equation.invars
        dtype = float_dtype(result.aval)
        if dtype is None:
            return ()
        if name == "convert_element_type":
            return self._of_cast(equation)
        if name in HANDS_ON or sums_nothing(equation):
            return (0,)
        if holds_half(result.aval) and self._rounds(equation):
            self.rounded.add(result)
            return ()
        of_dtype = [i for i, x in enumerate(operands) if float_dtype(x.aval) == dtype]
        if name in PRODUCTS:
            if self.accumulators and not holds_half(result.aval):
                return of_dtype
            of_dtype = _scaled(operands, weights)
        elif name not in LINEAR_IN_ALL:
            return ()
        if of_dtype and holds_half(result.aval):
            self.rounded.add(result)
        return of_dtype

    def _rounds(self, equation: Equation) -> bool:
        """Returns whether an equation sums half-precision numbers, and rounds the sum."""
        name = equation.primitive.name
        is_matmul = name in MATMULS and all(holds_half(x.aval) for x in equation.invars[:2])
        return name in WIDENABLE_SUMS or (self.accumulators and is_matmul)

    def _of_cast(self, equation: Equation) -> Sequence[int]:
        """Follows casts to other widths, and notes those that round to half."""
        before, after = float_dtype(equation.invars[0].aval), float_dtype(equation.outvars[0].aval)
        if before is None or after is None:
            return ()
        if before.itemsize > after.itemsize and holds_half(equation.outvars[0].aval):
            self.rounded.add(equation.outvars[0])
        return () if before.itemsize == after.itemsize and before != after else (0,)

    def _of_programs(
        self, equation: Equation, is_wanted: list[bool], weights: set[Any]
    ) -> Sequence[int]:
        found: set[int] = set()
        for program in subprograms(equation):
            if program.operands is None or program.role == "cond":
                continue
            wanted = list(is_wanted)
            is_weight = [_is_of_weights(equation.invars[i], weights) for i in program.operands]
            is_weight[program.carry] = [False] * program.carried
            while True:  # a loop carries from turn to turn
                reached = self.reached(program.body, wanted, is_weight)
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


def _of_weights(jaxpr: OpenJaxpr, is_weight: Sequence[bool]) -> set[Any]:
    """Returns the variables of a program that are computed from weights alone.

    Args:
      jaxpr: the program.
      is_weight: for each of its arguments, whether it is one.
    """
    weights = {v for v, one in zip(jaxpr.invars, is_weight, strict=True) if one}
    for equation in equations_of(jaxpr):
        if equation.invars and all(_is_of_weights(x, weights) for x in equation.invars):
            weights.update(equation.outvars)
    return weights


def _is_of_weights(atom: Any, weights: set[Any]) -> bool:
    return isinstance(atom, Literal) or atom in weights


def _scaled(operands: Sequence[Any], weights: set[Any]) -> list[int]:
    """Returns the operand of a product or quotient that the other one, of weights, scales."""
    first, second = (_is_of_weights(atom, weights) for atom in operands)
    return [int(first)] if first != second else []


def sums_nothing(equation: Equation) -> bool:
    """Returns whether an equation sums over axes of size 1: it transposes a broadcast of these."""
    return (
        equation.primitive.name == "reduce_sum"
        and equation.invars[0].aval.size == equation.outvars[0].aval.size
    )

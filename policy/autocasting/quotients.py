"""Quotients of two functions of one activation, such as ``y / (1 + abs(y))``: the gradients by
numerator and divisor almost cancel, so that they run in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy.autocasting.values import cast
from policy.functions.checkpointing import keeping_inputs
from policy.programs import primitives
from policy.programs.dtypes import F32
from policy.programs.jaxprs import Equation, OpenJaxpr, bind

_OF_ONE = primitives.ADDITIONS | primitives.PRODUCTS | primitives.MINMAX | primitives.SIGN_CHANGES
_OF_ONE |= primitives.POWERS | primitives.SQUARE_ROOTS | primitives.RESCALES
_MOST = 12  # equations of a quotient


Quotient = tuple[Any, Callable[[Any], Any]]
"""The variable, and a function of its array."""


def quotients(jaxpr: OpenJaxpr) -> dict[int, Quotient]:
    """Returns the divisions of two elementwise functions of one variable, by identity.

    ``y / (1 + abs(y))`` is one. Its function returns the quotient in the dtype of the variable's
    array, computed from it in float32. The array alone is saved for the gradient.
    """
    divisions = [e for e in jaxpr.eqns if _divides_variables(e)]
    makers = {v: e for e in jaxpr.eqns for v in e.outvars} if divisions else {}
    found: dict[int, Quotient] = {}
    for division in divisions:
        maker = makers.get(division.invars[0])
        for source in (division.invars[0], *(maker.invars if maker else ())):
            made = {id(division): division}
            if all(_is_made(atom, source, makers, made) for atom in division.invars):
                equations = [e for e in jaxpr.eqns if id(e) in made]
                run = functools.partial(_computed, source, equations)
                found[id(division)] = source, keeping_inputs(run)
                break
    return found


def _computed(source: Any, equations: Sequence[Equation], array: Any) -> Any:
    found = {source: cast(array, F32)}
    for each in equations:
        atoms = [np.float32(a.val) if _is_number(a) else found[a] for a in each.invars]
        (found[each.outvars[0]],) = bind(each, atoms)
    return cast(found[equations[-1].outvars[0]], array.dtype)


def _is_number(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def _divides_variables(equation: Equation) -> bool:
    is_float32 = equation.primitive.name == "div" and equation.outvars[0].aval.dtype == F32
    return is_float32 and not any(map(_is_number, equation.invars))


def _is_made(
    atom: Any, source: Any, makers: dict[Any, Equation], made: dict[int, Equation]
) -> bool:
    """Returns whether numbers and a source alone make a variable of its shape; notes how."""
    if _is_number(atom) or atom is source:
        return True
    maker = makers.get(atom)
    if maker is None or maker.primitive.name not in _OF_ONE or len(made) > _MOST:
        return False
    made[id(maker)] = maker
    is_alike = atom.aval.shape == source.aval.shape and atom.aval.dtype == source.aval.dtype
    return is_alike and all(_is_made(each, source, makers, made) for each in maker.invars)

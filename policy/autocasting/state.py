"""Outputs of a user's code that are state: a cache or carry that came in as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy.programs.jaxprs import OpenJaxpr, equations_of, subprograms
from policy.programs.primitives import CASTS, MOVES_DATA

_HANDS_ON = MOVES_DATA | CASTS


def operands_kept(body: OpenJaxpr, outputs: int, first: int) -> list[int | None]:
    """Returns, for each output that is state, the argument that it was; None for other outputs.

    It is the argument itself, the argument with new values written at some places, or the carry of
    a loop that starts with it. JAX gives all of these the dtype of the argument.

    Args:
      body: the program.
      outputs: the number of its outputs to look at, the first ones.
      first: the first input. It is state where values are written in it, and not where it is
        returned or carried through a loop, as activations are.
    """
    numbers = {variable: i for i, variable in enumerate(body.invars)}
    found = []
    for atom in body.outvars[:outputs]:
        origin, is_written = _origin(body, atom)
        place = None if isinstance(origin, jex_core.Literal) else numbers.get(origin)
        is_same = place is not None and body.invars[place].aval == atom.aval
        found.append(place if is_same and (is_written or place != first) else None)
    return found


def _origin(body: OpenJaxpr, atom: Any) -> tuple[Any, bool]:
    """Returns the variable whose values an output holds, in part, and whether others are written
    in it.
    """
    makers = {
        variable: equation for equation in equations_of(body) for variable in equation.outvars
    }
    is_written = False
    while not isinstance(atom, jex_core.Literal) and (equation := makers.get(atom)) is not None:
        name, inside = equation.primitive.name, subprograms(equation)
        place = equation.outvars.index(atom)
        writes = name == "dynamic_update_slice" or name.startswith("scatter")
        operand = 0 if writes or name in _HANDS_ON else None
        if name == "concatenate":  # a cache that is rolled or shifted
            operand = int(np.argmax([each.aval.size for each in equation.invars]))
        is_written |= writes
        if inside and name != "cond" and not name.startswith("scatter"):
            operand, writes = _through(inside, place)
            is_written |= writes
        if operand is None:
            break
        atom = equation.invars[operand]
    return atom, is_written


def _through(inside: Sequence[Any], place: int) -> tuple[int | None, bool]:
    """Returns the operand of an equation that an output of its program is, if any, and whether the
    program writes values in it.
    """
    one = inside[-1]
    if one.operands is None:
        return None, False
    if one.role == "loop":
        return (one.operands[one.carry.start + place] if place < one.carried else None), False
    origin, is_written = _origin(one.body, one.body.outvars[place])
    arguments = list(one.body.invars)
    return (one.operands[arguments.index(origin)] if origin in arguments else None), is_written

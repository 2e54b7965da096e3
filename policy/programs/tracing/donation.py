"""Arguments that a program's own jitted functions may overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policy.programs.subprograms import opened, subprograms


def donated_inputs(jaxpr: Any, *, is_wrapped: bool = False) -> tuple[int, ...]:
    """Returns the positions of a program's arguments that a function jitted with donation takes.

    Args:
      jaxpr: the program.
      is_wrapped: whether a transform has put a jit of its own around the user's program.
    """
    body, _ = opened(jaxpr)
    places = {id(variable): i for i, variable in enumerate(body.invars)}
    found = {
        places[id(equation.invars[operand])]
        for equation in body.eqns
        for operand in _donated_operands(equation, is_wrapped)
        if id(equation.invars[operand]) in places
    }
    return tuple(sorted(found))


def _donated_operands(equation: Any, is_wrapped: bool) -> Iterator[int]:
    """Yields the operands that an equation may overwrite, or that the programs inside it may."""
    for operand, is_donated in enumerate(equation.params.get("donated_invars", ())):
        if is_donated:
            yield operand
    for program in subprograms(equation) if is_wrapped else ():
        if program.role == "call" and program.operands is not None:
            for position in donated_inputs(program.jaxpr):
                yield program.operands[position]

"""Facts of traced programs that only tools ask for: what makes an output, what is donated, read or
held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import jax.extend.core as jex_core
from jax.interpreters import partial_eval

from policy.programs.jaxprs import Equation, held_program, opened, programs_of, subprograms


def maker_of(jaxpr: Any, place: int) -> Any:
    """Returns the equation that makes an output of a jaxpr, inside the calls that return it.

    A call that returns its argument, as an identity with a derivative of its own, makes nothing:
    the maker is that of the operand. Returns None if the output is an argument of the jaxpr.
    """
    return _maker_or_variable(jaxpr, place)[0]


def _maker_or_variable(jaxpr: Any, place: int) -> tuple[Any, Any]:
    """Returns the equation that makes an output, or None and the argument or constant it is."""
    body, _ = opened(jaxpr)
    variable = body.outvars[place]
    for equation in reversed(body.eqns):
        if variable not in equation.outvars:
            continue
        inner = held_program(equation)
        called = None if inner is None else opened(inner)[0]
        if called is None or len(called.outvars) != len(equation.outvars):
            return equation, None
        maker, handed = _maker_or_variable(inner, equation.outvars.index(variable))
        if maker is not None:
            return maker, None
        is_call = equation.primitive.name != "scan" and len(called.invars) == len(equation.invars)
        if not is_call or handed not in called.invars:
            return equation, None
        variable = equation.invars[called.invars.index(handed)]
    return None, variable


def donated_inputs(jaxpr: Any, *, is_wrapped: bool = False) -> tuple[int, ...]:
    """Returns the positions of a program's arguments that a function jitted with donation takes.

    Args:
      jaxpr: the program.
      is_wrapped: whether a transform has put a jit of its own around the user's program.
    """
    body, _ = opened(jaxpr)
    places = {id(variable): i for i, variable in enumerate(body.invars)}
    operands = (
        id(equation.invars[operand])
        for equation in body.eqns
        for operand in _donated_operands(equation, is_wrapped)
    )
    return tuple(sorted({places[operand] for operand in operands if operand in places}))


def _donated_operands(equation: Any, is_wrapped: bool) -> Iterator[int]:
    """Yields the operands that an equation may overwrite, or that the programs inside it may."""
    for operand, is_donated in enumerate(equation.params.get("donated_invars", ())):
        if is_donated:
            yield operand
    for program in subprograms(equation) if is_wrapped else ():
        if program.role == "call" and program.operands is not None:
            for position in donated_inputs(program.jaxpr):
                yield program.operands[position]


def live_part(jaxpr: Any) -> Any:
    """Returns a closed jaxpr without the equations that no output needs, with its arguments."""
    body: Any = opened(jaxpr)[0]
    live, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    return jex_core.ClosedJaxpr(live, opened(jaxpr)[1])


def combines_by(equation: Equation, names: Collection[str]) -> bool:
    """Returns whether a program of an equation contains one of these primitives."""
    return any(
        inner.primitive.name in names for program in programs_of(equation) for inner in program.eqns
    )


def constants_within(program: Any) -> dict[Any, Any]:
    """Returns the arrays that a program and those inside of it hold, by their variables."""
    body, consts = opened(program)
    found = dict(zip(body.constvars, consts, strict=True))
    for equation in body.eqns:
        for one in subprograms(equation):
            found |= constants_within(one.jaxpr)
    return found

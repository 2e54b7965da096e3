"""Searches through the equations of a program and of the programs inside it."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator
from typing import Any

import jax.extend.core as jex_core

from policy.programs.protocols import Equation, OpenJaxpr
from policy.programs.subprograms import opened, programs_of, subprograms


def equations_within(jaxpr: OpenJaxpr, *, once: bool = False) -> Iterator[Equation]:
    """Yields every equation of an open jaxpr and of programs inside it, in any role and order.

    Args:
      jaxpr: an open jaxpr.
      once: reads a program that several equations hold for the first of them alone.
    """
    waiting, seen = [jaxpr], {id(jaxpr)}
    while waiting:
        for equation in waiting.pop().eqns:
            yield equation
            inner = [one for one in programs_of(equation) if not once or id(one) not in seen]
            seen.update(map(id, inner))
            waiting.extend(inner)


def constants_within(program: Any) -> dict[Any, Any]:
    """Returns the arrays that a program and those inside of it hold, by their variables."""
    body, consts = opened(program)
    found = dict(zip(body.constvars, consts, strict=True))
    for equation in body.eqns:
        for one in subprograms(equation):
            found |= constants_within(one.jaxpr)
    return found


def runs_any(jaxpr: OpenJaxpr, names: Collection[str]) -> bool:
    """Returns whether an open jaxpr, or a program that it runs, has one of these primitives.

    Kernels and the functions that reductions apply to two numbers are not looked into.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name in names:
            return True
        for one in subprograms(equation):
            if one.is_run and runs_any(one.body, names):
                return True
    return False


def combines_by(equation: Equation, names: Collection[str]) -> bool:
    """Returns whether a program of an equation contains one of these primitives."""
    return any(
        inner.primitive.name in names for program in programs_of(equation) for inner in program.eqns
    )


def is_unwritten(jaxpr: OpenJaxpr, first: int = 0) -> list[bool]:
    """Returns, for each argument of an open jaxpr, whether no output can be its new value.

    A new value has the same shape, and is not the argument itself nor another one.

    Args:
      jaxpr: an open jaxpr.
      first: the index of the first output that may be one.
    """
    given = set(jaxpr.invars)
    written = {
        getattr(atom.aval, "shape", None)
        for atom in jaxpr.outvars[first:]
        if isinstance(atom, jex_core.Literal) or atom not in given
    }
    return [getattr(variable.aval, "shape", None) not in written for variable in jaxpr.invars]


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


def held_program(equation: Equation) -> Any:
    """Returns the one program that an equation runs, closed or open as the equation holds it.

    Returns None for equations that run no program, or several, as a while and a conditional do.
    """
    inner = subprograms(equation)
    is_one = len(inner) == 1 and inner[0].place is None and inner[0].is_run
    return inner[0].jaxpr if is_one else None


_SHARED = 3  # equations of a jit that is worth a trace of its own


def repeated_programs(jaxpr: OpenJaxpr) -> frozenset[int]:
    """Returns the `id`s of programs that several equations of a jaxpr, or of its `jit`s, hold."""
    counts: collections.Counter[int] = collections.Counter()
    bodies = [jaxpr]
    while bodies:
        for equation in bodies.pop().eqns:
            program = held_program(equation)
            if program is None:
                continue
            is_jit = equation.primitive.name in ("jit", "pjit")
            body = opened(program)[0] if is_jit else None
            if body is not None and not counts[id(program)]:
                bodies.append(body)
            counts[id(program)] += body is None or len(body.eqns) >= _SHARED
    return frozenset(identity for identity, count in counts.items() if count > 1)

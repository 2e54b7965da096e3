"""Marks on equations of a traced program, which decide how autocast evaluates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex_core

from policy.autocasting.cast_flow import Lines, is_of_layer
from policy.programs import marks, primitives
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    opened,
    subprograms,
    with_subprograms,
)


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
    if all(map(lambda new, old: new is old, equations, body.eqns)):
        result = jaxpr
    else:
        result = body.replace(eqns=equations)
        result = result if jaxpr is body else jaxpr.replace(jaxpr=result)
    done[id(body)] = result
    return result


def matmuls_and_kept(body: OpenJaxpr, found: Lines) -> list[Equation]:
    """Adds the matmuls of a program to `found`, and returns those that make results of modules
    whose own policy returns them unrounded.
    """
    atoms, kept = [], []
    for equation in body.eqns:
        if equation.primitive.name in primitives.CASTS:
            atoms += equation.invars if marks.mark_of(equation) == marks.KEPT else ()
        elif is_of_layer(equation):
            found.layers += [equation] if equation.primitive.name in primitives.MATMULS else []
        else:
            found.note(equation)
            before = len(found)
            for one in subprograms(equation):
                if one.is_run and one.operands is not None:
                    kept += matmuls_and_kept(one.body, found)
            found.calls += [equation] if len(found) > before else []
    return [*kept, *_makers_of(body, atoms)] if atoms else kept


def _makers_of(body: OpenJaxpr, atoms: list[Any]) -> Iterator[Equation]:
    """Yields the matmuls that some values are made by, up to elementwise operations and moves."""
    makers = {variable: equation for equation in body.eqns for variable in equation.outvars}
    seen: set[int] = set()
    while atoms:
        atom = atoms.pop()
        equation = None if isinstance(atom, jex_core.Literal) else makers.get(atom)
        if equation is None or id(equation) in seen or marks.mark_of(equation) is not None:
            continue
        seen.add(id(equation))
        if equation.primitive.name in primitives.MATMULS:
            yield equation
        elif equation.primitive.name in primitives.ELEMENTWISE | primitives.MOVES_DATA:
            atoms += equation.invars

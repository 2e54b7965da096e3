"""Arguments that a program's own jitted functions may overwrite."""

from __future__ import annotations

from typing import Any

from policy._jaxpr.subprograms import opened


def donated_inputs(jaxpr: Any) -> tuple[int, ...]:
    """Returns the positions of a program's arguments that a function jitted with donation takes."""
    body, _ = opened(jaxpr)
    places = {id(variable): i for i, variable in enumerate(body.invars)}
    found = {
        places[id(variable)]
        for equation in body.eqns
        for variable, is_donated in zip(
            equation.invars, equation.params.get("donated_invars", ()), strict=False
        )
        if is_donated and id(variable) in places
    }
    return tuple(sorted(found))

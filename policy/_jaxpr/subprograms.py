"""The programs that equations hold, whatever the JAX version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def opened(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr, closed or not, as an open one and its constants: jax 0.12 has one class for both."""
    consts = list(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def with_consts_as_arguments(jaxpr: Any) -> tuple[Any, list[Any]]:
    """An open jaxpr that takes the constants of a closed one as its first arguments, and the constants."""
    body, consts = opened(jaxpr)
    if not consts:
        return body, []
    if body is jaxpr:  # jax 0.12: the constants stand before the invars already
        return body.replace(consts=(), constvars=(), invars=(*body.constvars, *body.invars)), consts
    return body.replace(constvars=(), invars=(*body.constvars, *body.invars)), consts


def scan_arity(equation: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has.

    Read from shapes: the parameters that say so were renamed and made private in jax 0.11. What is scanned over, and
    what is stacked, has one axis more outside than in the body.
    """
    body, _ = opened(equation.params["jaxpr"])
    carried = [
        len(getattr(outer.aval, "shape", ())) == len(getattr(inner.aval, "shape", ()))
        for outer, inner in zip(equation.outvars, body.outvars, strict=True)
    ]
    whole = [
        len(getattr(outer.aval, "shape", ())) == len(getattr(inner.aval, "shape", ()))
        for outer, inner in zip(equation.invars, body.invars, strict=True)
    ]
    return sum(whole) - sum(carried), sum(carried)


def programs_of(equation: Any) -> Iterator[Any]:
    """The open jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for program in value if isinstance(value, (tuple, list)) else (value,):
            program = getattr(program, "jaxpr", program)
            if hasattr(program, "eqns"):
                yield program


def bind(equation: Any, arrays: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """The outputs of an equation's primitive on other operands."""
    given = equation.primitive.get_bind_params(equation.params if params is None else params)
    outputs = equation.primitive.bind(*arrays, **given)
    return list(outputs) if equation.primitive.multiple_results else [outputs]

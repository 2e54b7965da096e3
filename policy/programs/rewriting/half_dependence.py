"""Dependence on half precision: values of a program without it are the same in float32."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from policy.programs.equations import equations_within
from policy.programs.primitives import EXACT, HOST, STATES_BITS
from policy.programs.protocols import Equation, OpenJaxpr
from policy.programs.rewriting.control_flow import CONTROL_FLOW, is_for_platforms
from policy.programs.rewriting.upcast import dtype_of, is_half
from policy.programs.subprograms import Subprogram, programs_of, subprogram, subprograms


def rounds(equation: Equation) -> bool:
    """Returns whether an equation without programs gives another result in float32."""
    dtypes = [
        dtype for dtype in map(dtype_of, (*equation.invars, *equation.outvars)) if dtype is not None
    ]
    if not any(map(is_half, dtypes)):
        return _names_half(equation.params)
    name = equation.primitive.name
    if name in HOST or name in EXACT:
        return False
    if name == "convert_element_type":
        return not _widens(dtype_of(equation.invars[0]), equation.params["new_dtype"])
    return name not in STATES_BITS


def _names_half(params: dict[str, Any]) -> bool:
    """Returns whether a matmul of float32 is told to multiply in half."""
    precision = params.get("precision")
    algorithm = "" if precision is None else str(precision).lower()
    return "f16" in algorithm or "float16" in algorithm


def _widens(source: Any, target: Any) -> bool:
    if source == np.bool_ or not jnp.issubdtype(target, jnp.floating):
        return True
    if not jnp.issubdtype(source, jnp.floating):
        return False
    narrow, wide = jnp.finfo(source), jnp.finfo(target)
    return bool(
        narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp and narrow.minexp >= wide.minexp
    )


def depends(equation: Equation, given: Sequence[bool], apart: Collection[int] = ()) -> list[bool]:
    """Returns which outputs of an equation depend on half precision, if these operands do.

    `apart`: the `id`s of equations that float32 has other constants or other code for.
    """
    name = equation.primitive.name
    if id(equation) in apart:
        return [True] * len(equation.outvars)
    if any(hasattr(v.aval, "inner_aval") for v in (*equation.invars, *equation.outvars)):
        return [True] * len(equation.outvars)  # a value stored later may depend on it
    if name in HOST or (_calls_host(equation) and is_apart(equation, given, apart)):
        return [False] * len(equation.outvars)
    if name not in CONTROL_FLOW:
        return [any(given) or rounds(equation)] * len(equation.outvars)
    if is_apart(equation, given, apart):
        return [True] * len(equation.outvars)
    inner = [one for one in subprograms(equation) if one.role != "cond"]
    each = [_of_program(one, one.given(given), apart) for one in inner]
    return [any(outputs) for outputs in zip(*each, strict=True)]


def _of_program(one: Subprogram, arguments: Sequence[bool], apart: Collection[int]) -> list[bool]:
    """Returns which results of a program depend on half precision.

    A loop's body is followed until its carry depends on no more.
    """
    arguments = list(arguments)
    while True:
        outputs = _of_body(one.body, arguments, apart)
        carry = [a or b for a, b in zip(arguments[one.carry], outputs, strict=False)]
        if one.role != "loop" or carry == arguments[one.carry]:
            return [*carry, *outputs[one.carried :]]
        arguments[one.carry] = carry


def _of_body(body: OpenJaxpr, arguments: Sequence[bool], apart: Collection[int]) -> list[bool]:
    found = dict.fromkeys(body.constvars, False) | dict(zip(body.invars, arguments, strict=True))
    for equation in body.eqns:
        outputs = depends(equation, [_found(found, atom) for atom in equation.invars], apart)
        found.update(zip(equation.outvars, outputs, strict=True))
    return [_found(found, atom) for atom in body.outvars]


def _found(found: dict[Any, bool], atom: Any) -> bool:
    return False if hasattr(atom, "val") else found[atom]


def is_apart(equation: Equation, given: Sequence[bool], apart: Collection[int] = ()) -> bool:
    """Returns whether float32 may take a different control flow through an equation's programs.

    It may take another branch, or run more steps.
    """
    name = equation.primitive.name
    if name == "cond":
        return given[0] or is_for_platforms(equation)
    if name != "while":
        return False
    loop, cond = subprogram(equation, "loop"), subprogram(equation, "cond")
    carry = _of_program(loop, loop.given(given), apart)
    return _of_body(cond.body, [*cond.given(given)[cond.fixed], *carry], apart)[0]


def _calls_host(equation: Equation) -> bool:
    """Returns whether there is a callback in one of the programs of an equation."""
    return any(
        inner.primitive.name in HOST
        for one in programs_of(equation)
        for inner in equations_within(one, once=True)
    )

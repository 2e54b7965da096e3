"""The values of a program that depend on half precision: all others are the same in float32, and computed once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from policy._jaxpr.interpreter import HANDLERS
from policy._jaxpr.primitives import EXACT, HOST, STATES_BITS
from policy._jaxpr.subprograms import opened, programs_of, scan_arity
from policy._jaxpr.upcast import dtype_of, is_half


def rounds(equation: Any) -> bool:
    """Returns whether an equation without inner programs gives another result in float32 from the same numbers."""
    dtypes = [dtype for dtype in map(dtype_of, (*equation.invars, *equation.outvars)) if dtype is not None]
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
    return bool(narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp and narrow.minexp >= wide.minexp)


def depends(equation: Any, given: Sequence[bool], apart: Collection[int] = ()) -> list[bool]:
    """Returns which outputs of an equation depend on half precision, if these operands do.

    `apart`: the `id`s of equations that float32 has other constants or other code for.
    """
    name, params = equation.primitive.name, equation.params
    if id(equation) in apart:
        return [True] * len(equation.outvars)
    if any(hasattr(v.aval, "inner_aval") for v in (*equation.invars, *equation.outvars)):
        return [True] * len(equation.outvars)  # what is stored later may depend on it
    if name in HOST or (calls_host(equation) and is_apart(equation, given, apart)):
        return [False] * len(equation.outvars)
    if name not in HANDLERS:
        return [any(given) or rounds(equation)] * len(equation.outvars)
    if is_apart(equation, given, apart):
        return [True] * len(equation.outvars)
    if name == "scan":
        consts, carried = scan_arity(equation)
        return _looped(params["jaxpr"], list(given), consts, carried, apart)
    if name == "while":
        n = params["cond_nconsts"]
        return _looped(params["body_jaxpr"], list(given[n:]), params["body_nconsts"], len(equation.outvars), apart)
    if name == "cond":
        branches = [_of_program(branch, given[1:], apart) for branch in params["branches"]]
        return [any(outputs) for outputs in zip(*branches, strict=True)]
    return _of_program(next(programs_of(equation)), given, apart)


def _looped(body: Any, given: list[bool], consts: int, carried: int, apart: Collection[int]) -> list[bool]:
    while True:
        outputs = _of_program(body, given, apart)
        after = [a or b for a, b in zip(given[consts : consts + carried], outputs, strict=False)]
        if after == given[consts : consts + carried]:
            return [*after, *outputs[carried:]]
        given[consts : consts + carried] = after


def _of_program(program: Any, given: Sequence[bool], apart: Collection[int]) -> list[bool]:
    body, _ = opened(program)
    found = dict.fromkeys(body.constvars, False) | dict(zip(body.invars, given, strict=True))
    for equation in body.eqns:
        outputs = depends(equation, [_found(found, atom) for atom in equation.invars], apart)
        found.update(zip(equation.outvars, outputs, strict=True))
    return [_found(found, atom) for atom in body.outvars]


def _found(found: dict[Any, bool], atom: Any) -> bool:
    return False if hasattr(atom, "val") else found[atom]


def is_apart(equation: Any, given: Sequence[bool], apart: Collection[int] = ()) -> bool:
    """Returns whether float32 may take another way through an equation's programs: another branch, or more steps."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return given[0] or params.get("branches_platforms") is not None
    if name != "while":
        return False
    n, m = params["cond_nconsts"], params["body_nconsts"]
    carried = _looped(params["body_jaxpr"], list(given[n:]), m, len(equation.outvars), apart)
    return _of_program(params["cond_jaxpr"], [*given[:n], *carried], apart)[0]


def calls_host(equation: Any) -> bool:
    """Returns whether there is a callback in an equation or in one of its programs."""
    if equation.primitive.name in HOST:
        return True
    return any(calls_host(inner) for program in programs_of(equation) for inner in program.eqns)

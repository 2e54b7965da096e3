"""Handlers of equations that hold programs: autocast's operands, and the shared control flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from policy._jaxpr import control_flow
from policy._jaxpr.control_flow import Body
from policy._jaxpr.equations import runs_any
from policy._jaxpr.primitives import CALLS, MATMULS, REMATS
from policy._jaxpr.protocols import Equation, OpenJaxpr
from policy._jaxpr.subprograms import bind, subprogram, subprograms, with_subprograms
from policy.autocast.derivative_rules import custom_jvp, custom_vjp
from policy.autocast.evaluator import AutocastHandler, Evaluator, as_traced, traced_kind
from policy.autocast.memoization import once_for_all_alike
from policy.autocast.values import CastValue


def _jit(evaluator: Evaluator, equation: Equation, values: list[CastValue]) -> list[CastValue]:
    """Inlines a jit, unless it has shardings, donated operands or compiler options."""
    if not control_flow.has_options(equation):
        return _inlined(evaluator, equation, values)
    arrays = as_traced(equation.invars, values)
    like = [
        CastValue(array, value.yields, value.constant, is_table=value.is_table)
        for array, value in zip(arrays, values, strict=True)
    ]
    return control_flow.jit(evaluator, equation, like)


_inlined = once_for_all_alike(control_flow.call, saves=False)


def _scan(evaluator: Evaluator, equation: Equation, values: list[CastValue]) -> list[CastValue]:
    carry = subprogram(equation, "loop").carry
    values = _carrying_as_traced(equation, values, carry)
    before = evaluator.saved(equation, [*values[: carry.start], *values[carry.stop :]])
    values = [*before[: carry.start], *values[carry], *before[carry.start :]]
    return control_flow.scan(evaluator, equation, values)


def _while(evaluator: Evaluator, equation: Equation, values: list[CastValue]) -> list[CastValue]:
    carry = slice(len(values) - len(equation.outvars), len(values))
    return control_flow.while_loop(
        evaluator, equation, _carrying_as_traced(equation, values, carry)
    )


def _carrying_as_traced(
    equation: Equation, values: Sequence[CastValue], carry: slice
) -> list[CastValue]:
    """Returns the operands of a loop, the carry in the dtypes that it was traced with."""
    init = map(CastValue, as_traced(equation.invars[carry], values[carry]))
    return [*values[: carry.start], *init, *values[carry.stop :]]


def _cond(evaluator: Evaluator, equation: Equation, values: list[CastValue]) -> list[CastValue]:
    if control_flow.is_for_platforms(
        equation
    ):  # the branches of all platforms must return the same dtypes
        return _platforms(evaluator.inside(equation), equation, as_traced(equation.invars, values))
    return control_flow.cond(evaluator, equation, values)


def _platforms(inside: Evaluator, equation: Equation, arrays: list[Any]) -> list[CastValue]:
    """Rebuilds branches by platform with the same primitive, which alone knows the platforms."""
    operands, out = arrays[1:], list(map(traced_kind, equation.outvars))
    if not any(_may_narrow(inside, one.body) for one in subprograms(equation)):
        return [CastValue(output) for output in bind(equation, arrays)]
    inputs = list(map(CastValue, operands))
    branches = [Body.of(inside, one, inputs, out) for one in subprograms(equation)]
    rewritten = [jax.make_jaxpr(branch.arrays)(*operands) for branch in branches]
    return [
        CastValue(output)
        for output in bind(equation, arrays, with_subprograms(equation, rewritten))
    ]


def _may_narrow(evaluator: Evaluator, program: OpenJaxpr) -> bool:
    """Returns whether a program has to be rewritten or reported if its operands are as traced."""
    settings = evaluator.settings
    names = MATMULS | settings.allow
    return settings.strict or evaluator.report is not None or runs_any(program, names)


HANDLERS: Mapping[str, AutocastHandler] = {
    "jit": _jit,
    **dict.fromkeys(CALLS, control_flow.call),
    **dict.fromkeys(REMATS, once_for_all_alike(control_flow.remat)),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": control_flow.shard_map,
    "custom_jvp_call": once_for_all_alike(custom_jvp),
    "custom_vjp_call": custom_vjp,
}

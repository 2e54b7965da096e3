"""Rebuilds functions with custom derivative rules: the function and its rules are rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from policy.autocasting.evaluator import Evaluator, as_traced, opaque_kind
from policy.autocasting.settings import UnknownPrimitiveError
from policy.autocasting.values import CastValue, cast
from policy.programs.control_flow import Body
from policy.programs.dtypes import float_dtype
from policy.programs.protocols import Equation
from policy.programs.subprograms import bind, subprogram


def _dtypes(atoms: Sequence[Any]) -> list[Any]:
    return [float_dtype(atom.aval) for atom in atoms]


def _floats(arrays: Sequence[Any]) -> list[int]:
    return [i for i, array in enumerate(arrays) if jax.numpy.issubdtype(array.dtype, np.inexact)]


def _filled(arrays: Sequence[Any], floats: Sequence[int], given: Sequence[Any]) -> list[Any]:
    filled = list(arrays)
    for i, array in zip(floats, given, strict=True):
        filled[i] = array
    return filled


def custom_jvp(
    evaluator: Evaluator, equation: Equation, values: list[CastValue]
) -> list[CastValue]:
    """Rebuilds a function with a custom_jvp rule: both are rewritten."""
    inside = evaluator.inside(equation)
    arrays, like_traced = evaluator.flat(values), _dtypes(equation.invars)
    floats = _floats(arrays)
    body = Body.of(inside, subprogram(equation, "call"), values)

    @jax.custom_jvp
    def function(*arrays: Any) -> list[Any]:
        return body.arrays(*arrays)

    def original(given: Sequence[Any], moved: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        before = [given[i] for i in floats]
        return jax.jvp(
            lambda *before: bind(equation, _filled(given, floats, before)), before, moved
        )

    @function.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        # The author's rule of the original function, over abstract values of the traced dtypes.
        before = _in(like_traced, primals)
        rule = jax.make_jaxpr(original)(before, [before[i] for i in floats])
        moved = [tangents[i] for i in floats]
        run = Body(inside, rule, [*values, *[CastValue(t) for t in moved]])
        outputs = run.arrays(*primals, *moved)
        half = len(outputs) // 2
        if not body.outputs:  # an eager derivative asks for the rule alone
            jax.eval_shape(body.arrays, *primals)
        primals_out = [
            cast(o, known.dtype) for o, known in zip(outputs[:half], body.outputs, strict=True)
        ]
        tangents_out = [
            cast(o, known.dtype) if jax.numpy.issubdtype(known.dtype, np.inexact) else o
            for o, known in zip(outputs[half:], body.outputs, strict=True)
        ]
        return primals_out, tangents_out

    results = function(*arrays)
    return evaluator.refilled(body.outputs, results)


def custom_vjp(
    evaluator: Evaluator, equation: Equation, values: list[CastValue]
) -> list[CastValue]:
    """Rebuilds a function with custom_vjp rules, or leaves it as traced if that fails."""
    values = evaluator.saved(equation, values)
    try:
        return _rebuilt_vjp(evaluator, equation, values)
    except UnknownPrimitiveError:
        raise
    except (
        Exception
    ):  # the author's rules may raise anything on abstract values: then they run as written
        if evaluator.report is not None:
            evaluator.report.note(
                evaluator.path, "custom_vjp_call", opaque_kind(equation), evaluator.flat(values)
            )
        return [CastValue(output) for output in bind(equation, as_traced(equation.invars, values))]


def _rebuilt_vjp(
    evaluator: Evaluator, equation: Equation, values: list[CastValue]
) -> list[CastValue]:
    """Rebuilds the rules only if the function is differentiated, as a rule may call it."""
    inside = evaluator.inside(equation)
    arrays, like_traced = evaluator.flat(values), _dtypes(equation.invars)
    closed_over = equation.params.get("num_consts", 0)  # the rules do not take these
    floats = [i for i in _floats(arrays) if i >= closed_over]
    body = Body.of(inside, subprogram(equation, "call"), values)
    backward: list[Any] = []

    def original(*given: Any) -> tuple[list[Any], Any]:
        moved = [given[i] for i in floats]
        return jax.vjp(lambda *moved: bind(equation, _filled(given, floats, moved)), *moved)

    def rewritten(*given: Any) -> tuple[list[Any], list[Any]]:
        forward, (outputs, pullback) = jax.make_jaxpr(original, return_shape=True)(
            *_in(like_traced, given)
        )
        residuals, treedef = jax.tree.flatten(pullback)
        backward[:] = [
            jax.make_jaxpr(lambda saved, ct: jax.tree.unflatten(treedef, saved)(ct))(
                residuals, outputs
            )
        ]
        results = Body(inside, forward, values).arrays(*given)
        return results[: len(outputs)], results[len(outputs) :]

    @jax.custom_vjp
    def function(*given: Any) -> list[Any]:
        return body.arrays(*given)

    def fwd(*primals: Any) -> tuple[list[Any], Any]:
        given = [primal.value for primal in primals]
        if any(primal.perturbed for primal in primals[:closed_over]):
            raise TypeError(
                "A function with a custom_vjp rule is differentiated with respect to a value that "
                "it closes over: pass that value as an argument."
            )
        try:
            outputs, saved = rewritten(*given)
        except UnknownPrimitiveError:
            raise
        except (
            Exception
        ):  # the author's rules may raise anything on abstract values: then they run as written
            if evaluator.report is not None:
                evaluator.report.note(
                    evaluator.path, "custom_vjp_call", opaque_kind(equation), given
                )
            outputs, saved = original(*_in(like_traced, given))
        if not body.outputs:  # outside of a trace the rule alone is asked for
            jax.eval_shape(body.arrays, *given)
        return [
            cast(output, known.dtype) for output, known in zip(outputs, body.outputs, strict=True)
        ], saved

    def bwd(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        cotangents = [
            jax.numpy.zeros(ct.shape, ct.dtype) if _is_zero(ct) else ct for ct in cotangents
        ]
        if isinstance(saved, list):
            given = [*saved, *cotangents]
            found = Body(inside, backward[0], list(map(CastValue, given))).arrays(*given)
        else:
            found = saved(_in(_dtypes(equation.outvars), cotangents))
        gradients: list[Any] = [None] * len(arrays)
        for i, gradient in zip(floats, found, strict=True):
            gradients[i] = cast(gradient, arrays[i].dtype)
        return tuple(gradients)

    function.defvjp(fwd, bwd, symbolic_zeros=True)
    results = function(*arrays)
    return evaluator.refilled(body.outputs, results)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _in(dtypes: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    return [a if dtype is None else cast(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True)]

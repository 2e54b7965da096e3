"""Rebuilds functions with custom derivative rules: the function and its rules are rewritten."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from policy.autocasting.evaluator import Evaluator
from policy.autocasting.operations import opaque_kind
from policy.autocasting.requests import with_requests_of_rule
from policy.autocasting.settings import UnknownPrimitiveError
from policy.autocasting.source_lines import is_of_linear_algebra
from policy.autocasting.values import CastValue, Values, bound_as_traced, cast
from policy.programs.dtypes import float_dtype
from policy.programs.jaxprs import Equation, bind, subprogram
from policy.programs.rewriting.interpreter import Body


def custom_jvp(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    """Rebuilds a function with a custom_jvp rule: both are rewritten.

    Those of JAX's linear algebra, such as `jnp.linalg.pinv`, run in float32 as they are.
    """
    if is_of_linear_algebra(subprogram(equation, "call").body):
        return bound_as_traced(equation, values)
    inside = evaluator.inside(equation)
    arrays, compute = evaluator.flat(values), evaluator.place_of(equation).compute
    floats = _floats(arrays)
    body = Body(inside, subprogram(equation, "call"), values)

    @jax.custom_jvp
    def function(*arrays: Any) -> list[Any]:
        return body.arrays(*arrays)

    def rule_of(equation: Equation, primals: Sequence[Any]) -> Any:
        """Returns the author's rule over abstract values of the traced dtypes."""

        def original(given: Sequence[Any], moved: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            before = [given[i] for i in floats]
            return jax.jvp(
                lambda *before: bind(equation, _filled(given, floats, before)), before, moved
            )

        before = list(map(cast, primals, _dtypes(equation.invars)))
        return jax.make_jaxpr(original)(before, [before[i] for i in floats])

    @function.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        with evaluator.tracing_rules(equation):
            again = functools.partial(rule_of, primals=primals)
            rule = with_requests_of_rule(again(equation), equation, compute, again)
        moved = [tangents[i] for i in floats]
        run = Body(inside, rule, [*values, *[CastValue(t, is_tangent=True) for t in moved]])
        outputs = run.arrays(*primals, *moved)
        half = len(outputs) // 2
        given, moved = outputs[:half], outputs[half:]
        return _of_dtypes(body, given, primals), _of_dtypes(body, moved, primals)

    results = function(*arrays)
    return evaluator.refilled(body.outputs, results)


def custom_vjp(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    """Rebuilds a function with custom_vjp rules.

    The rules are rebuilt only if it is differentiated, as a rule may call it. If that fails, they
    run as they were written.
    """
    values = evaluator.saved(equation, values)
    rules = _VjpRules(evaluator, equation, values)
    body = Body(rules.inside, subprogram(equation, "call"), values)

    @jax.custom_vjp
    def function(*given: Any) -> list[Any]:
        return body.arrays(*given)

    def fwd(*primals: Any) -> tuple[list[Any], Any]:
        given = [primal.value for primal in primals]
        if any(primal.perturbed for primal in primals[: rules.closed_over]):
            raise TypeError(
                "A function with a custom_vjp rule is differentiated with respect to a value that "
                "it closes over: pass that value as an argument."
            )
        try:
            outputs, saved = rules.forward(*given)
        except UnknownPrimitiveError:
            raise
        except Exception:  # the author's rules may raise anything on abstract values
            if evaluator.report is not None:
                kind = opaque_kind(equation)
                evaluator.report.note(evaluator.path, "custom_vjp_call", kind, given)
            outputs, saved = rules.original(*given)
        return _of_dtypes(body, outputs, given), saved

    def bwd(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        found = rules.pulled_back(saved, list(map(_materialized, cotangents)))
        gradients = _filled([None] * len(values), rules.floats, found)
        pairs = zip(gradients, rules.arrays, strict=True)
        return tuple(None if g is None else cast(g, array.dtype) for g, array in pairs)

    function.defvjp(fwd, bwd, symbolic_zeros=True)
    results = function(*rules.arrays)
    return evaluator.refilled(body.outputs, results)


class _VjpRules:
    """The author's rules of a function, over values of the dtypes that it was traced with.

    Attributes:
      floats: the operands that it is differentiated by, by index. The rules do not take those that
        it closes over.
      backward: the rule of the backward pass as a program, once the function was differentiated.
    """

    def __init__(self, evaluator: Evaluator, equation: Equation, values: Values):
        self.equation, self.values = equation, values
        self.inside, self.arrays = evaluator.inside(equation), evaluator.flat(values)
        self.scope = lambda: evaluator.tracing_rules(equation)
        self.compute = evaluator.place_of(equation).compute
        self.closed_over = equation.params.get("num_consts", 0)
        self.floats = [i for i in _floats(self.arrays) if i >= self.closed_over]
        self.backward: Any = None

    def original(self, *given: Any) -> tuple[list[Any], Any]:
        """Returns the results and the pullback of the function as its author wrote them."""
        return self._differentiated(self.equation, *given)

    def _differentiated(self, equation: Equation, *given: Any) -> tuple[list[Any], Any]:
        given = tuple(map(cast, given, _dtypes(equation.invars)))
        moved = [given[i] for i in self.floats]
        with self.scope():
            return jax.vjp(
                lambda *moved: bind(equation, _filled(given, self.floats, moved)), *moved
            )

    def forward(self, *given: Any) -> tuple[list[Any], list[Any]]:
        """Returns the results and the residuals of the rewritten function."""
        forward, backward = self._traced(self.equation, given)
        again = lambda second: self._traced(second, given)[0]  # noqa: E731
        forward = with_requests_of_rule(forward, self.equation, self.compute, again)
        self.backward = with_requests_of_rule(backward, self.equation, self.compute)
        results = Body(self.inside, forward, self.values).arrays(*given)
        count = len(self.equation.outvars)
        return results[:count], results[count:]

    def _traced(self, equation: Equation, given: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the programs of the rules of an equation, on values of the traced dtypes."""
        before = list(map(cast, given, _dtypes(equation.invars)))
        original = functools.partial(self._differentiated, equation)
        forward, (outputs, pullback) = jax.make_jaxpr(original, return_shape=True)(*before)
        residuals, treedef = jax.tree.flatten(pullback)
        dtypes = _dtypes(equation.outvars)

        def pulled_back(saved: list[Any], cotangents: list[Any]) -> Any:
            with self.scope():
                return jax.tree.unflatten(treedef, saved)(list(map(cast, cotangents, dtypes)))

        return forward, jax.make_jaxpr(pulled_back)(residuals, outputs)

    def pulled_back(self, saved: Any, cotangents: Sequence[Any]) -> Any:
        """Returns the cotangents of `floats`, for residuals of `forward` or `original`'s
        pullback.
        """
        if isinstance(saved, list):
            given = [*saved, *cotangents]
            return Body(self.inside, self.backward, list(map(CastValue, given))).arrays(*given)
        with self.scope():
            return saved(list(map(cast, cotangents, _dtypes(self.equation.outvars))))


def _materialized(cotangent: Any) -> Any:
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jax.numpy.zeros(aval.shape, aval.dtype)


def _of_dtypes(body: Body[CastValue], outputs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Returns the results of a rule, or their tangents, in the dtypes of those of the function."""
    if not body.outputs:  # an eager derivative asks for the rule alone
        jax.eval_shape(body.arrays, *given)
    floats = _floats([known.array for known in body.outputs])
    dtypes = [known.dtype if i in floats else None for i, known in enumerate(body.outputs)]
    return list(map(cast, outputs, dtypes))


def _dtypes(atoms: Sequence[Any]) -> list[Any]:
    return [float_dtype(atom.aval) for atom in atoms]


def _floats(arrays: Sequence[Any]) -> list[int]:
    inexact = jax.numpy.inexact
    return [i for i, array in enumerate(arrays) if jax.numpy.issubdtype(array.dtype, inexact)]


def _filled(arrays: Sequence[Any], floats: Sequence[int], given: Sequence[Any]) -> list[Any]:
    filled = list(arrays)
    for i, array in zip(floats, given, strict=True):
        filled[i] = array
    return filled

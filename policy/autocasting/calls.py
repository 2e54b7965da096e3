"""Handlers of equations that hold programs: autocast's operands, and the shared control flow."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util

from policy.autocasting.derivative_rules import custom_jvp, custom_vjp
from policy.autocasting.evaluator import AutocastHandler, Evaluator
from policy.autocasting.values import CastValue, Values, as_traced, bound, cast
from policy.functions.checkpointing import keeping_inputs
from policy.programs import primitives
from policy.programs.dtypes import F32, float_dtype
from policy.programs.jaxprs import (
    Equation,
    equations_within,
    held_program,
    runs_any,
    subprogram,
    subprograms,
    with_subprograms,
)
from policy.programs.paths import scanned_path
from policy.programs.rewriting import interpreter
from policy.programs.rewriting.interpreter import Body

# --------------------------------------------------------------------------------------------------
# Equal equations, such as those of layers that share a trace, are rewritten once
# --------------------------------------------------------------------------------------------------


def once_for_all_alike(handler: AutocastHandler, *, saves: bool = True) -> AutocastHandler:
    """Returns a handler that traces and differentiates equal equations once.

    The normalizations of a model are an example: their equations hold the same program. The handler
    must return new values that do not refer to its operands.

    Args:
      handler: the handler.
      saves: whether it gets its operands as `Evaluator.saved` returns them.
    """

    @functools.wraps(handler)
    def shared(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
        values = evaluator.saved(equation, values) if saves else values
        if id(held_program(equation)) not in evaluator.places.repeated:
            return handler(evaluator, equation, values)
        programs, key = evaluator.places.shared, _key(evaluator, equation, values)
        if key not in programs:
            programs[key] = _rewritten(handler, evaluator, equation, values)
        call, outputs = programs[key]
        arrays = call(*evaluator.flat(values))
        return evaluator.refilled(outputs, arrays)

    return shared


def _rewritten(
    handler: AutocastHandler, evaluator: Evaluator, equation: Equation, values: Values
) -> tuple[Any, Values]:
    """Returns the program of an equation as a function of arrays, and its outputs without arrays.

    The outputs are known once it was traced. The function keeps the equation's parameters alive,
    whose identities are part of the key.
    """
    inputs, known = [value.with_array(None) for value in values], []

    def rewritten(*arrays: Any) -> list[Any]:
        # The names around the first equation do not apply to the others.
        with source_info_util.reset_name_stack():
            outputs = handler(evaluator, equation, evaluator.refilled(inputs, arrays))
        known[:] = [output.with_array(None) for output in outputs]
        return evaluator.flat(outputs)

    rewritten.__name__ = rewritten.__qualname__ = equation.primitive.name
    return jax.jit(rewritten, inline=True), known


def _key(evaluator: Evaluator, equation: Equation, values: Values) -> Hashable:
    """Returns a key that is equal for equations with the same rewritten program.

    Without rules, the place of an equation decides for the equations inside it. Their relative
    names do not depend on it, except for names that start again at the root.
    """
    path = evaluator.path_of(equation)
    where = evaluator.place_of(equation), path[:1], frozenset(evaluator.held_by(equation).items())
    params = tuple((name, id(value)) for name, value in sorted(equation.params.items()))
    constants = tuple((getattr(v.constant, "dtype", None), str(v.constant)) for v in values)
    names = "yields", "narrows", "weak", "is_table", "is_mask", "is_picked", "is_scaled"
    facts = operator.attrgetter(*names)
    known = tuple((jax.typeof(value.array), facts(value)) for value in values)
    return equation.primitive, params, where, constants, known


V = TypeVar("V")


class Recent(dict[Hashable, V], Generic[V]):
    """At most `most` values, those that were kept last."""

    def __init__(self, most: int):
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def keep(self, key: Hashable, value: V) -> V:
        """Keeps a value, and returns it."""
        with self._lock:
            self[key] = value
            if len(self) > self._most:
                del self[next(iter(self))]
        return value


# --------------------------------------------------------------------------------------------------
# Handlers
# --------------------------------------------------------------------------------------------------


def _jit(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    """Inlines a jit, unless it has shardings, donated operands or compiler options."""
    if not interpreter.has_options(equation):
        handler = _checkpointed if _is_activation(evaluator, equation, values) else _inlined
        return handler(evaluator, equation, values)
    arrays = as_traced(equation.invars, values)
    pairs = zip(arrays, values, strict=True)
    like = [CastValue(array, v.yields, v.constant, is_table=v.is_table) for array, v in pairs]
    return interpreter.rebound(evaluator, equation, like)


_inlined_once = once_for_all_alike(interpreter.call, saves=False)


def _inlined(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    """Inlines a jit. Operands that only float32 operations in it read are upcast by its caller.

    Its caller upcasts an operand once for all users. In ``x / norm(x)``, of which the norm is a
    shared jit, the cotangents of both almost cancel: they are added before they are rounded.
    """
    body, is_half = subprogram(equation, "call").body, evaluator.place_of(equation).compute != F32
    given = [
        CastValue(value.as_dtype(F32))
        if is_half and value.is_half and not value.yields and _is_read_wide(evaluator, body, v)
        else value
        for v, value in zip(body.invars, values, strict=True)
    ]
    return _inlined_once(evaluator, equation, given)


def _is_read_wide(evaluator: Evaluator, body: Any, variable: Any) -> bool:
    """Returns whether only float32 operations of a program read one of its arguments."""
    users = [each for each in body.eqns if any(atom is variable for atom in each.invars)]
    return bool(users) and all(
        evaluator.settings.category(each.primitive.name) == "fp32"
        or (each.primitive.name == "mul" and each.invars[0] is each.invars[1])
        for each in users
    )


def _is_activation(evaluator: Evaluator, equation: Equation, values: Values) -> bool:
    """Returns whether a jit is an elementwise function of half-precision activations, in float32.

    Softplus is one, as its exponential and logarithm are. Its residuals would be float32.
    """
    if not equation.outvars:
        return False
    shape = equation.outvars[0].aval.shape
    is_half = [v.narrows or v.is_half for v in values if v.is_float and v.array.shape == shape]
    if not is_half or not all(is_half) or evaluator.place_of(equation).compute == F32:
        return False
    names = {each.primitive.name for each in equations_within(subprogram(equation, "call").body)}
    is_wide = any(evaluator.settings.category(name) == "fp32" for name in names & _ELEMENTWISE)
    return is_wide and names <= _ELEMENTWISE and evaluator.settings.narrows


_ELEMENTWISE = (
    primitives.ELEMENTWISE
    | primitives.TRANSCENDENTALS
    | primitives.INLINED
    | primitives.COMPARISONS
    | primitives.FORWARDS
    | primitives.BOUNDED
    | {"jit"}
)


@once_for_all_alike
def _checkpointed(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    """Inlines a jit of which backward keeps the operands alone."""
    body = Body(evaluator.inside(equation), subprogram(equation, "call"), values)
    results = keeping_inputs(body.arrays)(*evaluator.flat(values))
    return evaluator.refilled(body.outputs, results)


def _scan(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    program = subprogram(equation, "loop")
    values = evaluator.saved(equation, _carrying_as_traced(equation, values, program.carry))
    for i in range(len(values))[program.fixed]:
        if values[i].yields and values[i].is_half:
            values[i] = values[i].widened_param()  # read in every step
    carried = _carries_handed_on(evaluator, equation, values)
    return interpreter.scan(evaluator, equation, values, carried)


def _while(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    carry = slice(len(values) - len(equation.outvars), len(values))
    values = _carrying_as_traced(equation, values, carry)
    return interpreter.while_loop(evaluator, equation, values)


def _carrying_as_traced(equation: Equation, values: Values, carry: slice) -> Values:
    """Returns the operands of a loop, the carry in the dtypes that it was traced with."""
    init = map(CastValue, as_traced(equation.invars[carry], values[carry]))
    return [*values[: carry.start], *init, *values[carry.stop :]]


def _cond(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    if interpreter.is_for_platforms(equation):  # whose branches must return the same dtypes
        return _platforms(evaluator.inside(equation), equation, as_traced(equation.invars, values))
    return interpreter.cond(evaluator, equation, values)


def _platforms(inside: Evaluator, equation: Equation, arrays: list[Any]) -> Values:
    """Rebuilds branches by platform with the same primitive, which alone knows the platforms."""
    settings, programs = inside.settings, subprograms(equation)
    is_told = settings.strict or inside.report is not None
    narrowed = primitives.MATMULS | settings.allow
    if not is_told and not any(runs_any(one.body, narrowed) for one in programs):
        return bound(equation, arrays)
    operands, out = arrays[1:], [CastValue(v.aval) for v in equation.outvars]
    branches = [Body(inside, one, list(map(CastValue, operands)), out) for one in programs]
    rewritten = [jax.make_jaxpr(branch.arrays)(*operands) for branch in branches]
    return bound(equation, arrays, with_subprograms(equation, rewritten))


def _carries_handed_on(evaluator: Evaluator, equation: Equation, values: Values) -> Values:
    """Returns a value like each carry of a scan.

    It is half precision if a rule requires it and a step given half precision also returns it.
    Otherwise it is as traced: a narrowed accumulator is 76% off after 4096 steps.
    """
    program = subprogram(equation, "loop")
    carried = [variable.aval for variable in equation.outvars[: program.carried]]
    given, traced = program.given(values), list(map(float_dtype, carried))
    half = _half_carry(evaluator, equation, given[program.rows])
    out = traced
    if half is not None and equation.params["length"]:
        out = _stable(evaluator, equation, given, traced, half)
    pairs = zip(carried, out, strict=True)
    kinds = (a if dtype is None else jax.ShapeDtypeStruct(a.shape, dtype) for a, dtype in pairs)
    return list(map(CastValue, kinds))


def _half_carry(evaluator: Evaluator, equation: Equation, xs: Values) -> Any:
    """Returns the half dtype of the carry between layers, or None."""
    body, above = subprogram(equation, "loop").body, evaluator.path_of(equation)
    layer = scanned_path(body, above)
    half = evaluator.places.output_of(layer) if layer != above else None
    has_weights = any(x.yields and np.ndim(x.array) > 2 for x in xs)  # each step its own
    if evaluator.settings.narrows_scans and has_weights and runs_any(body, primitives.MATMULS):
        compute = evaluator.places[above].compute
        half = compute if compute.itemsize < F32.itemsize else half
    return half


def _stable(
    evaluator: Evaluator, equation: Equation, given: Values, traced: Sequence[Any], half: Any
) -> list[Any]:
    """Returns the dtypes of a carry that a step preserves, found by fixpoint iteration."""
    program, inside = subprogram(equation, "loop"), evaluator.inside(equation, reports=False)
    fixed, xs = given[program.fixed], given[program.rows]
    init = evaluator.flat(given[program.carry])
    pairs = zip(traced, init, strict=True)
    out = [half if dtype == F32 and np.ndim(array) else dtype for dtype, array in pairs]

    def step(fixed_arrays: list[Any], init: list[Any], xs_arrays: list[Any]) -> list[Any]:
        carry = list(map(cast, init, out))
        rows = [lax.index_in_dim(array, 0, keepdims=False) for array in xs_arrays]
        pairs = zip(rows, xs, strict=True)
        steps = [CastValue(row, x.yields, is_table=x.is_table) for row, x in pairs]
        like = [*fixed, *map(CastValue, carry), *steps]
        return Body(inside, program, like).arrays(*fixed_arrays, *carry, *rows)[: program.carried]

    while True:
        found = jax.eval_shape(step, evaluator.flat(fixed), init, evaluator.flat(xs))
        stable = [
            t if d == half != o.dtype else d for d, o, t in zip(out, found, traced, strict=True)
        ]
        if stable == out:
            return out
        out = stable


HANDLERS: Mapping[str, AutocastHandler] = {
    "jit": _jit,
    **dict.fromkeys(primitives.CALLS, interpreter.call),
    **dict.fromkeys(primitives.REMATS, once_for_all_alike(interpreter.rebound)),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": interpreter.shard_map,
    "custom_jvp_call": once_for_all_alike(custom_jvp),
    "custom_vjp_call": custom_vjp,
}

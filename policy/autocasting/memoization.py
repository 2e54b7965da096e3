"""Programs that are kept: those of equal equations, such as those of layers that share a trace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from policy.autocasting.evaluator import AutocastHandler, Evaluator
from policy.autocasting.values import Values
from policy.programs.jaxprs import Equation, held_program


def once_for_all_alike(handler: AutocastHandler, *, saves: bool = True) -> AutocastHandler:
    """Returns a handler that traces and differentiates equal equations once.

    The normalisations of a model are an example: their equations hold the same program. The handler
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
    known = tuple(
        (jax.typeof(v.array), v.yields, _exactly(v.constant), v.narrows, v.weak, v.is_table)
        for v in values
    )
    return equation.primitive, params, where, known


def _exactly(constant: Any) -> Hashable:
    return None if constant is None else (jnp.result_type(constant), str(constant))


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

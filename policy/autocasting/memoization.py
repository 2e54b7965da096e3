"""Rewrites equal equations once, such as those of layers that share a trace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from policy.autocasting.evaluator import AutocastHandler, Evaluator
from policy.autocasting.values import CastValue
from policy.programs.equations import held_program
from policy.programs.protocols import Equation


@dataclasses.dataclass
class _Shared:
    """The rewritten program of an equation.

    Attributes:
      equation: the first of the equal equations. It keeps its parameters alive, whose identities
        are part of the key.
      call: the program as a function of arrays.
      known: the outputs without their arrays, set by the trace.
    """

    equation: Equation
    call: Any = None
    known: list[CastValue] = dataclasses.field(default_factory=list)


def once_for_all_alike(handler: AutocastHandler, *, saves: bool = True) -> AutocastHandler:
    """Returns a handler that traces and differentiates equal equations once.

    The normalisations of a model are an example: their equations hold the same program. The handler
    must return new values that do not refer to its operands.

    Args:
      handler: the handler.
      saves: whether it gets its operands as `Evaluator.saved` returns them.
    """

    @functools.wraps(handler)
    def shared(
        evaluator: Evaluator, equation: Equation, values: list[CastValue]
    ) -> list[CastValue]:
        values = evaluator.saved(equation, values) if saves else values
        if id(held_program(equation)) not in evaluator.places.repeated:
            return handler(evaluator, equation, values)
        key = _key(evaluator, equation, values)
        found = evaluator.places.shared.get(key)
        if found is None:
            found = evaluator.places.shared[key] = _Shared(equation)
            found.call = _call(
                handler, evaluator, found, [_without_array(value) for value in values]
            )
        outputs = found.call(*(value.array for value in values))
        return [
            _with_array(output, known) for output, known in zip(outputs, found.known, strict=True)
        ]

    return shared


def _call(
    handler: AutocastHandler, evaluator: Evaluator, found: _Shared, inputs: Sequence[CastValue]
) -> Any:
    def rewritten(*arrays: Any) -> list[Any]:
        values = [_with_array(array, known) for array, known in zip(arrays, inputs, strict=True)]
        with (
            source_info_util.reset_name_stack()
        ):  # the names around the first equation do not apply to the others
            outputs = handler(evaluator, found.equation, values)
        found.known = [_without_array(output) for output in outputs]
        return [output.array for output in outputs]

    rewritten.__name__ = rewritten.__qualname__ = found.equation.primitive.name
    return jax.jit(rewritten, inline=True)


def _key(evaluator: Evaluator, equation: Equation, values: Sequence[CastValue]) -> Hashable:
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


def _without_array(value: CastValue) -> CastValue:
    return _with_array(None, value)


def _with_array(array: Any, known: CastValue) -> CastValue:
    return dataclasses.replace(known, array=array, narrowed=None, widened=None, transposed=None)

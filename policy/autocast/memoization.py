"""Equations that are alike are rewritten once: layers that share a trace share its rewriting."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from policy._jaxpr.equations import held_program
from policy.autocast.evaluator import Evaluator, Handler
from policy.autocast.values import Value


@dataclasses.dataclass
class _Shared:
    """The rewritten program of an equation.

    Attributes:
      equation: the first of those that are alike; its parameters, whose identities are part of the
        key, live as long.
      call: the program, as a function of arrays.
      known: the facts about each output, once it was traced.
    """

    equation: Any
    call: Any = None
    known: list[Value] = dataclasses.field(default_factory=list)


def once_for_all_alike(handler: Handler) -> Handler:
    """Returns a handler that is traced and differentiated once for all equations that are alike.

    Such are the normalisations of a model: their equations hold the very same program. The handler
    gets its operands as `Evaluator.saved` narrows them; its results are new, and refer to none of
    them.
    """

    @functools.wraps(handler)
    def shared(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
        values = evaluator.saved(equation, values)
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


def _call(handler: Handler, evaluator: Evaluator, found: _Shared, inputs: Sequence[Value]) -> Any:
    def rewritten(*arrays: Any) -> list[Any]:
        values = [_with_array(array, known) for array, known in zip(arrays, inputs, strict=True)]
        with (
            source_info_util.reset_name_stack()
        ):  # the first equation's names are not those of the others
            outputs = handler(evaluator, found.equation, values)
        found.known = [_without_array(output) for output in outputs]
        return [output.array for output in outputs]

    rewritten.__name__ = rewritten.__qualname__ = found.equation.primitive.name
    return jax.jit(rewritten, inline=True)


def _key(evaluator: Evaluator, equation: Any, values: Sequence[Value]) -> Hashable:
    """Equal where the same rewritten program will do.

    Without rules an equation's place decides for those inside of it, whose names are the same
    wherever it stands, but for those that start again at the root.
    """
    path = evaluator.path_of(equation)
    where = evaluator.place_of(equation), path[:1], frozenset(evaluator.held_by(equation).items())
    params = tuple((name, id(value)) for name, value in sorted(equation.params.items()))
    known = tuple((jax.typeof(v.array), v.yields, _exactly(v.constant), v.narrows) for v in values)
    return equation.primitive, params, where, known


def _exactly(constant: Any) -> Hashable:
    return None if constant is None else (jnp.result_type(constant), str(constant))


def _without_array(value: Value) -> Value:
    return Value(None, value.yields, value.constant, value.narrows)


def _with_array(array: Any, known: Value) -> Value:
    return Value(array, known.yields, known.constant, known.narrows)

"""Matmuls of a parameter: those that a policy's ``m=`` is about."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from policy.programs.operations import is_inexact_name, kind_of
from policy.programs.primitives import ADDITIONS, MOVES_DATA, PRODUCTS
from policy.programs.reading.dependence import AS_IT_IS, PARAMETER, dependences, is_cotangent
from policy.programs.reading.graph import Graph, Node, Value, is_joint, readers_past

_KEEPS = AS_IT_IS | PRODUCTS | ADDITIONS  # return a gradient as it is, scaled, or added to one


class WeightMatmul(NamedTuple):
    """A matmul of which one operand is made of parameters, or whose result is their gradient.

    Attributes:
      node: the matmul.
      weight: the operand that is made of parameters: 0 is the left one; None for their gradient.
    """

    node: Node
    weight: int | None


def weight_matmuls(graph: Graph, params: Collection[int]) -> Iterator[WeightMatmul]:
    """Yields the dots with parameters, forward and backward.

    Args:
      graph: the program.
      params: the places of the parameters among its arguments.
    """
    made_of = dependences(graph, params)
    for node in graph.nodes:
        if kind_of(node.name) != "dot" or len(node.inputs) < 2 or is_joint(node):
            continue
        weights = [i for i in (0, 1) if made_of[id(node.inputs[i])] == PARAMETER]
        if len(weights) == 1:
            yield WeightMatmul(node, weights[0])
        elif not weights and is_cotangent(node) and _is_gradient(node):
            yield WeightMatmul(node, None)


def are_codes(node: Node) -> bool:
    """Returns whether a matmul multiplies int8 codes of floating numbers, one operand at least."""
    return any(value.dtype == "int8" and _was_floating(value) for value in node.inputs[:2])


def _was_floating(value: Value) -> bool:
    waiting, seen = [value], {id(value)}
    while waiting:
        maker = waiting.pop().maker
        if maker is None:
            continue
        if maker.name == "convert_element_type":
            if is_inexact_name(maker.inputs[0].dtype):
                return True
        elif not is_joint(maker) and maker.name not in MOVES_DATA:
            continue
        fresh = [one for one in maker.inputs if id(one) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)
    return False


def _is_gradient(node: Node) -> bool:
    """Returns whether a result is returned as it is, but for casts, scales and sums of such."""
    passes = lambda one: is_joint(one) or one.name in _KEEPS  # noqa: E731
    kept = filter(passes, readers_past(node.outputs, passes))
    return any(value.is_output for one in (node, *kept) for value in one.outputs)

"""Dependence of a program's values on parameters, on other arguments and on cotangents."""

from __future__ import annotations

from collections.abc import Collection

from policy.programs.primitives import CASTS, MOVES_DATA
from policy.programs.reading.graph import Graph, Node, Value

PARAMETER, OTHER, COTANGENT = 1, 2, 4  # as bits
AS_IT_IS = MOVES_DATA | CASTS
"""Hand on the numbers of their operand, in another shape or dtype."""


def dependences(graph: Graph, params: Collection[int]) -> dict[int, int]:
    """Returns, by a value's id, bits that tell whether it depends on parameters, on others, and on
    what the backward pass computes.
    """
    found: dict[int, int] = {
        id(value): PARAMETER if i in params else OTHER for i, value in enumerate(graph.arguments)
    }
    for _ in range(2):  # carries depend on what their bodies return
        for node in graph.traced:
            on = COTANGENT if is_cotangent(node) and node.name not in AS_IT_IS else 0
            for value in node.inputs:
                on |= _of(value, found)
            found.update((id(out), on) for out in node.outputs)
    for node in graph.traced:
        found.update((id(value), _of(value, found)) for value in node.inputs)
    return found


def _of(value: Value, found: dict[int, int]) -> int:
    return found.get(id(value), 0)


def is_cotangent(node: Node) -> bool:
    """Returns whether a node is in the backward pass and is not rematerialised there."""
    return node.site.is_backward and not node.site.is_recomputed

"""Finds bounded activations whose distance from their bound matters, as in a loss by hand:

    p = sigmoid(x);  -y * log(p) - (1 - y) * log(1 - p)

bfloat16 rounds a `p` above 1 - 2**-9 to 1, and the loss to infinity. So does the caller of a model
that returns `p`.
"""

from __future__ import annotations

from policy.autocasting.normalizations import COPIES
from policy.programs import primitives
from policy.programs.reading.graph import Graph, Node, Value

_DIVERGES = primitives.DIVIDES - primitives.SQUARE_ROOTS - primitives.POWERS
_MIXES = primitives.FORWARD_ADDITIONS | primitives.PRODUCTS | primitives.MINMAX | {"select_n"}
_THROUGH = COPIES | _MIXES | primitives.SIGN_CHANGES | primitives.POWERS


def complements(graph: Graph, *, returns: bool) -> tuple[set[Node], set[Node]]:
    """Returns the operations between bounded activations and logarithms, powers or divisors.

    Args:
      graph: the program.
      returns: whether its outputs count, too, where they are activations that numbers alone scale
        or shift.

    Returns:
      The operations, and the activations.
    """
    diverges = (node for node in graph.nodes if node.name in _DIVERGES)
    read = [value for node in diverges for value in node.inputs[node.name == "div" :]]
    before = _before(read, mixes=True)
    if returns:
        before |= _before([v for v in graph.outputs if v.is_float], mixes=False)
    activations = {node for node in before if node.name in primitives.BOUNDED}
    reached = set(activations)
    for node in graph.nodes:
        if node in before and any(value.maker in reached for value in node.inputs):
            reached.add(node)
    return reached - activations, activations


def _before(values: list[Value], *, mixes: bool) -> set[Node]:
    """Returns what computes some values, from bounded activations on.

    Without `mixes`, each operation has one operand that is no number.
    """
    found: set[Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop().maker
        if node is None or node in found or node.name not in _THROUGH | primitives.BOUNDED:
            continue
        operands = [value for value in node.inputs if value.is_float and value.number is None]
        if node.name in primitives.BOUNDED or mixes or len(operands) == 1:
            found.add(node)
            waiting += [] if node.name in primitives.BOUNDED else operands
    return found

"""Finds bounded activations whose distance from their bound matters, as in a loss by hand:

    p = sigmoid(x);  -y * log(p) - (1 - y) * log(1 - p)

bfloat16 rounds a `p` above 1 - 2**-9 to 1, and the loss to infinity. So does the user of a model
that returns `p`, and a loop that multiplies its carry by `p` in every step.
"""

from __future__ import annotations

from policy.autocasting.normalizations import COPIES
from policy.programs import primitives
from policy.programs.primitives import BOUNDED, STEEP_AT_BOUNDS, STEEP_AT_ONE
from policy.programs.reading.graph import Graph, Node, Value, is_joint, readers_past

_MIXES = primitives.FORWARD_ADDITIONS | primitives.PRODUCTS | primitives.MINMAX | {"select_n"}
_PLACES = primitives.PLACES | {"stack"}
_ALONE = COPIES | _MIXES | _PLACES | primitives.SIGN_CHANGES | primitives.POWERS
_TOGETHER = primitives.ACCUMULATES | primitives.EXTREMES | primitives.ORDERS
_INLINED = primitives.CALLS | {"jit"}
_EPSILON = 0.01  # a number up to this keeps a divisor from 0: what it is added to is no complement


def complements(graph: Graph, *, returns: bool) -> tuple[set[Node], set[Node]]:
    """Returns the operations between bounded activations and functions that are steep at a bound.

    Sums and extrema are followed where a number is added to the activation, or to its sum, and
    before functions that are steep at 1: the divisor of ``s / sum(s)`` is no complement.

    Args:
      graph: the program.
      returns: whether its outputs count, too, where they are activations that numbers alone scale
        or shift.

    Returns:
      The operations, with those activations that a program inside an equation reads, whose
      operands are saved in 16 bits otherwise; and the other activations.
    """
    steep = {node for node in graph.nodes if _is_steep(node)}
    before: set[Node] = set()
    for node in steep:
        values = node.inputs[node.name == "div" :]
        before |= _before(values, mixes=True, is_shifted=node.name in STEEP_AT_ONE)
    for node in graph.nodes:
        if node.name == "mul" and (gates := [v for v in node.inputs if not _is_carried(v)]):
            gated = _before(gates, mixes=False, is_shifted=False) if len(gates) == 1 else set()
            before |= gated | {node} if gated else gated
    if returns:
        outputs = [value for value in graph.outputs if value.is_float]
        before |= _before(outputs, mixes=False, is_shifted=False)
    activations = {node for node in before if node.name in BOUNDED}
    reached = set(activations)
    for node in graph.nodes:
        if node in before and any(value.maker in reached for value in node.inputs):
            reached.add(node)
    activations -= {node for node in activations if _is_read_inside(node, reached | steep)}
    # Saves nothing, and would round the distance if it was rounded.
    makers = {value.maker for node in activations | reached for value in node.inputs}
    shifts = {node for node in makers if node and _shifts(node) and len(node.out.readers) == 1}
    return (reached | shifts) - activations, activations


def _is_read_inside(activation: Node, users: set[Node]) -> bool:
    """Returns whether some of an activation's users stand in a program that saves its operands."""
    depth = _saved_depth(activation)
    found = readers_past([activation.out], lambda node: is_joint(node) and node in users)
    return any(user in users and _saved_depth(user) > depth for user in found)


def _saved_depth(node: Node) -> int:
    return sum(name not in _INLINED for name in node.site.inside)


def _is_steep(node: Node) -> bool:
    return node.name in STEEP_AT_BOUNDS and not (
        node.name == "integer_pow" and node.params["y"] > 0
    )


def _before(values: list[Value], *, mixes: bool, is_shifted: bool) -> set[Node]:
    """Returns the operations that compute some values, from bounded activations on.

    Without `mixes`, each operation has one operand that is no number, and reduces nothing. If the
    values are shifted, activations in sums and extrema need no addition of a number.
    """
    found: set[Node] = set()
    seen: set[tuple[Node, bool, bool]] = set()
    waiting = [(value, False, is_shifted) for value in values]
    while waiting:
        value, is_reduced, is_shifted = waiting.pop()
        node = value.maker
        if node is None or (node, is_reduced, is_shifted) in seen:
            continue
        seen.add((node, is_reduced, is_shifted))
        operands = [value for value in node.inputs if value.is_float and value.number is None]
        is_passed = node.name in _ALONE and (mixes or len(operands) < 2)
        if node.name in BOUNDED:
            found |= {node} if is_shifted or not is_reduced else set()
        elif is_passed or (mixes and node.name in _TOGETHER):
            found.add(node)
            facts = is_reduced or node.name in _TOGETHER, is_shifted or _shifts(node)
            waiting += [(operand, *facts) for operand in operands]
    return found


def _is_carried(value: Value) -> bool:
    """Returns whether a value is a copy of a loop's carry."""
    while value.maker is not None and value.maker.name in COPIES - {"carry"}:
        value = value.maker.inputs[0]
    return value.maker is not None and value.maker.name == "carry"


def _shifts(node: Node) -> bool:
    """Returns whether an operation adds a number to a value, or subtracts it, beyond an epsilon."""
    if node.name not in primitives.FORWARD_ADDITIONS:
        return False
    numbers = map(_magnitude, node.inputs)
    return any(number is not None and number > _EPSILON for number in numbers)


def _magnitude(value: Value) -> float | None:
    """Returns that of the number of a literal, or of an array that a literal is repeated in."""
    while value.number is None and value.maker is not None and value.maker.name in COPIES:
        value = value.maker.inputs[0]
    return None if value.number is None else float(abs(value.number))

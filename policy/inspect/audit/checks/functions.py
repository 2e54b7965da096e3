"""Functions of half-precision numbers whose error or range matters: exp, log, roots, squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy.inspect.audit.equality import are_equal
from policy.inspect.audit.finding_kinds import FUNCTION, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.uses import is_summed, joins_by_hand, matters
from policy.inspect.audit.values import (
    behind,
    is_cotangent,
    is_layout,
    is_matmul,
    is_narrow,
    made_of,
    reached,
)
from policy.programs.operations import is_steep, kind_of
from policy.programs.primitives import PERIODIC, PRODUCTS, RESCALES, ROOTS
from policy.programs.reading.graph import Node, Value, is_joint

_STEEPNESS = (
    "an argument near 10 is rounded by 0.03, which is 3% of its exponential",
    "exponentials overflow above 11, and logarithms are off by their argument's last digit",
)


def low_precision_functions(flow: Flow) -> Iterator[Finding]:
    """Yields functions of half-precision numbers that are not mere activations."""
    for node in flow.graph.nodes:
        if is_cotangent(node) or is_joint(node) or not node.inputs:
            continue
        if is_narrow(node.inputs[0].dtype) and (reason := _reason(node)):
            yield finding(FUNCTION, node, f"{node.name} of {node.inputs[0].dtype}: {reason}")


def _reason(node: Node) -> str:
    """Returns the reason why a function should not run in half precision, or ""."""
    name, dtype = node.name, node.inputs[0].dtype
    if all(value.is_literal for value in node.inputs):
        return ""
    if is_steep(name) and matters(node):
        steepness = _STEEPNESS[dtype == "float16"]
        return (
            f"{steepness}, and it is summed, divided by or returned. Cast the argument to float32."
        )
    if name in PERIODIC:
        return (
            "the argument's last digit is a large part of a turn. Compute the angles, and this "
            "function of them, in float32."
        )
    if name == "rsqrt" or (name == "sqrt" and _is_statistic(node.inputs[0])):
        limit = "overflows above 65504" if dtype == "float16" else "has 8 significant bits"
        return (
            f"a variance or norm in {dtype} {limit}. Keep statistics in float32, and cast the "
            "normalised result back."
        )
    if name == "div" and _is_root_of_statistic(node.inputs[1]):
        return (
            f"it normalises in {dtype}, by a rounded deviation or norm. Normalise in float32, and "
            "cast the result back."
        )
    if _is_norm_by_dot(node):
        return (
            "a dot sums squares in float16, and overflows above 65504. Give it "
            "preferred_element_type=jnp.float32."
        )
    if _divides_by_dot(node):
        return (
            "it divides by a variance or norm whose squares a dot sums in float16, which overflows "
            "above 65504. Sum the squares in float32."
        )
    if _squares(node) and (is_summed(node.out) or _is_added_to_a_square(node)):
        limit = "overflow above 255" if dtype == "float16" else "lose all but 8 bits"
        return f"squares in {dtype} {limit}, and these are summed. Cast to float32 before squaring."
    return ""


def _is_norm_by_dot(node: Node) -> bool:
    """Returns whether a node is the inner product of float16 rows with themselves."""
    if node.name != "dot_general" or node.out.dtype != "float16" or not _is_dot_of_squares(node):
        return False
    (contracted, _), (batch, _) = node.params["dimension_numbers"]
    return len(contracted) + len(batch) == len(node.inputs[0].shape)


def _divides_by_dot(node: Node) -> bool:
    """Returns whether a node takes a root, reciprocal or log of squares summed by a float16 dot."""
    if node.inputs[0].dtype != "float16":
        return False
    if node.name == "div":
        divisor = node.inputs[1]
        return _is_root_of_statistic(divisor, _is_dot_of_squares) or _is_statistic(
            divisor, _is_dot_of_squares
        )
    exponent = node.params.get("y")
    is_root = node.name in ROOTS or node.name.startswith("log")
    is_reciprocal = node.name == "integer_pow" and isinstance(exponent, int) and exponent < 0
    return (is_root or is_reciprocal) and _is_statistic(node.inputs[0], _is_dot_of_squares)


def _is_dot_of_squares(node: Node) -> bool:
    """Returns whether a node is a half-precision matmul of squares, or of equal operands."""
    if not is_matmul(node) or not all(is_narrow(value.dtype) for value in node.inputs[:2]):
        return False
    makers = [made_of(value).maker for value in node.inputs[:2]]
    return are_equal(node.inputs[0], node.inputs[1]) or any(
        maker is not None and _squares(maker) for maker in makers
    )


def _is_reduction(node: Node) -> bool:
    return kind_of(node.name) == "reduction"


def _squares(node: Node) -> bool:
    if node.name == "mul":
        return are_equal(node.inputs[0], node.inputs[1])
    return node.name == "square" or (node.name == "integer_pow" and node.params.get("y") == 2)


def _is_added_to_a_square(node: Node) -> bool:
    """Returns whether a square, times any factor, is added to another one by hand."""
    multiples = reached([node.out], lambda reader: is_layout(reader) or reader.name in PRODUCTS)
    return any(joins_by_hand(reader, _squares) for one in multiples for reader in one.readers)


def _is_statistic(value: Value, of: Callable[[Node], bool] = _is_reduction) -> bool:
    """Returns whether a value is a sum by a node that `of` accepts; cast, shifted or scaled."""
    return any(
        one.maker is not None and not is_joint(one.maker) and of(one.maker)
        for one in behind(value, _rescaled)
    )


def _is_root_of_statistic(value: Value, of: Callable[[Node], bool] = _is_reduction) -> bool:
    """Returns whether a value is a square root of such a sum; cast, shifted or scaled."""
    roots = (one.maker for one in behind(value, _rescaled))
    return any(
        root is not None and root.name == "sqrt" and _is_statistic(root.inputs[0], of)
        for root in roots
    )


def _rescaled(node: Node) -> list[Value]:
    return node.inputs if is_layout(node) or node.name in RESCALES else []

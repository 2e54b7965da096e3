"""Dtypes of the values of a program, and walks from value to value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator

from policy.programs.dtypes import is_eight_bits as is_eight_bits
from policy.programs.dtypes import is_inexact_name
from policy.programs.operations import kind_of
from policy.programs.primitives import MOVES_DATA
from policy.programs.reading.graph import Node, Value, is_joint
from policy.programs.reading.matmul_operands import is_cotangent as is_cotangent

Passes = Callable[[Node], bool]
"""Tells whether a walk goes on through a node."""


@functools.cache
def bits(dtype: str) -> int:
    """Returns the width in bits of a real floating dtype, by its name; 0 for any other."""
    if not is_inexact_name(dtype) or dtype.startswith("complex"):
        return 0
    digits = "".join(c if c.isdigit() else " " for c in dtype.split("_")[0]).split()
    return int(digits[0]) if digits else 0


def is_narrow(dtype: str) -> bool:
    """Returns whether a dtype is floating and narrower than float32."""
    return 0 < bits(dtype) < 32


def is_wide(dtype: str) -> bool:
    """Returns whether a dtype is float32 or float64."""
    return bits(dtype) >= 32


def is_sixteen_bits(dtype: str) -> bool:
    """Returns whether a dtype is floating, and of more than 8 bits but less than 32."""
    return 8 < bits(dtype) < 32


def is_complex(dtype: str) -> bool:
    """Returns whether a dtype is complex."""
    return dtype.startswith("complex")


def is_cast(node: Node) -> bool:
    """Returns whether a node casts between real floating dtypes."""
    return (
        node.name == "convert_element_type"
        and bits(node.inputs[0].dtype) > 0
        and bits(node.out.dtype) > 0
    )


def widens(node: Node) -> bool:
    """Returns whether a node casts a value from half precision to float32 or float64."""
    return is_cast(node) and is_narrow(node.inputs[0].dtype) and is_wide(node.out.dtype)


def narrows(node: Node) -> bool:
    """Returns whether a node casts a value from float32 or float64 to half precision."""
    return is_cast(node) and is_wide(node.inputs[0].dtype) and is_narrow(node.out.dtype)


def is_matmul(node: Node) -> bool:
    """Returns whether a node is a matmul or a convolution."""
    return kind_of(node.name) in ("dot", "convolution") and not is_joint(node)


def is_layout(node: Node) -> bool:
    """Returns whether a node moves numbers without changing any."""
    return node.name in MOVES_DATA


def is_view(node: Node) -> bool:
    """Returns whether a node moves or casts numbers."""
    return is_layout(node) or is_cast(node)


def is_selection(node: Node) -> bool:
    """Returns whether a node selects from all of its inputs but the first."""
    return node.name in ("select_n", "branch")


def operands(node: Node) -> list[Value]:
    """Returns the floating operands of a matmul."""
    return [value for value in node.inputs if bits(value.dtype)]


# --------------------------------------------------------------------------------------------------
# Towards the arguments
# --------------------------------------------------------------------------------------------------


def moved_from(node: Node, value: Value) -> Value:
    """Returns the operand that a data movement makes a result of."""
    if len(node.outputs) == len(node.inputs):
        return next(v for v, out in zip(node.inputs, node.outputs, strict=True) if out is value)
    return node.inputs[0]


def views(value: Value, passes: Passes = is_layout) -> Iterator[Value]:
    """Yields a value, and those that it is a view of, through nodes that `passes` accepts."""
    yield value
    while value.maker is not None and value.maker.inputs and passes(value.maker):
        value = moved_from(value.maker, value)
        yield value


def made_of(value: Value, passes: Passes = is_layout) -> Value:
    """Returns the first value that this one is a view of."""
    *_, first = views(value, passes)
    return first


def behind(
    value: Value,
    operands: Callable[[Node], Iterable[Value]] = lambda node: node.inputs,
    most: float = math.inf,
) -> Iterator[Value]:
    """Yields a value, and those that it is computed from.

    Args:
      operands: gives the operands of a node that the walk goes on with.
      most: the number of values after which the walk ends.
    """
    return followed([value], lambda one: () if one.maker is None else operands(one.maker), most)


def in_order(value: Value, goes_on: Passes) -> Iterator[Node]:
    """Yields the nodes that a value is made by within one iteration of every loop, the first ones
    first. Nodes that `goes_on` refuses, and those that only they depend on, are left out.
    """
    seen, waiting = set[Node](), [(value.maker, False)]
    while waiting:
        node, is_next = waiting.pop()
        if node is not None and is_next:
            yield node
        elif node is not None and node not in seen and node.name != "carry" and goes_on(node):
            seen.add(node)
            waiting += [(node, True), *((one.maker, False) for one in node.inputs)]


# --------------------------------------------------------------------------------------------------
# Towards the results
# --------------------------------------------------------------------------------------------------


def reached(values: Iterable[Value], passes: Passes = is_layout) -> Iterator[Value]:
    """Yields values, and all values derived from them through nodes that `passes` accepts."""
    return followed(
        values,
        lambda value: [out for node in value.readers if passes(node) for out in node.outputs],
    )


def users(value: Value, passes: Passes = is_layout) -> Iterator[Node]:
    """Yields the nodes that compute with a value, looking through nodes that `passes` accepts."""
    return (node for each in reached([value], passes) for node in each.readers if not passes(node))


def is_returned(value: Value) -> bool:
    """Returns whether the program returns a value or a view of it."""
    return any(each.is_output for each in reached([value]))


def followed(
    values: Iterable[Value], following: Callable[[Value], Iterable[Value]], most: float = math.inf
) -> Iterator[Value]:
    """Yields values, and those that `following` gives for each of them, once; `most` at most."""
    waiting = list(values)
    seen = set(map(id, waiting))
    while waiting and len(seen) < most:
        value = waiting.pop()
        yield value
        fresh = [one for one in following(value) if id(one) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)

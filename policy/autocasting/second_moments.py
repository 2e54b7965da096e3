"""Second moments, and chains of values that move, shift and scale the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from policy.programs.primitives import (
    BROADCASTS,
    ELEMENTWISE,
    FORWARD_ADDITIONS,
    FORWARDS,
    OF_MOMENTS,
    SIGN_CHANGES,
)
from policy.programs.reading.graph import Node, Value

SUMS = frozenset(("reduce_sum",))
COPIES = FORWARDS | {"row", "rows", "shard", "shards", "branch"}
"""Copy elements of an operand, some of them or several times."""
# Primitives allowed between the sum of a second moment and its root.
_OF_MOMENTS = COPIES | OF_MOMENTS
_DEEPEST = (
    8  # operations that are followed back to find whether a value repeats numbers along an axis
)


@dataclasses.dataclass
class Moment:
    """A sum of squares.

    Attributes:
      of: the squared value.
      is_mean: whether it is divided by a count, and not taken over all axes.
      operations: the operations between `of` and the sum.
    """

    of: Value
    is_mean: bool
    operations: list[Node]


@dataclasses.dataclass
class Statistics:
    moments: list[Moment] = dataclasses.field(default_factory=list)
    operations: list[Node] = dataclasses.field(default_factory=list)
    has_sums: bool = False


def statistics_of(data: Value) -> Statistics:
    """Returns the sums of squares that a value is computed from, and the operations since."""
    found, seen, left = Statistics(), set(), [(data, False)]
    while left:
        data, is_mean = left.pop()
        operation = data.maker
        if operation is None or operation in seen or operation.name not in _OF_MOMENTS:
            continue
        seen.add(operation)
        found.operations.append(operation)
        if operation.name in SUMS:
            found.has_sums = True
            found.moments += _moment(operation, is_mean)
            continue
        for i, operand in enumerate(operation.inputs):
            if operand.is_float:
                left.append((operand, is_mean or _divides(operation, i)))
    return found


def _divides(operation: Node, i: int) -> bool:
    """Returns whether an operation divides its operand `i` or multiplies it by a number.

    A mean does either to its sum.
    """
    others = [data for j, data in enumerate(operation.inputs) if j != i]
    if operation.name == "div":
        return i == 0
    return operation.name == "mul" and any(data.number is not None for data in others)


def _moment(sum_: Node, is_mean: bool) -> Iterator[Moment]:
    data, operations = sum_.inputs[0], []
    while (operation := data.maker) is not None:
        operations.append(operation)
        squared = _squared(operation)
        if squared is not None:
            yield Moment(squared, is_mean and sum_.outputs[0].shape != (), operations)
            return
        if operation.name in SUMS:
            data = operation.inputs[0]
            continue
        following = _through(operation)
        if following is None:
            return
        is_mean = is_mean or operation.name == "div"
        data = following


def _squared(operation: Node) -> Value | None:
    """Returns the value that an operation squares, or None."""
    if operation.name == "square" or (
        operation.name == "integer_pow" and operation.params["y"] == 2
    ):
        return operation.inputs[0]
    if operation.name == "mul" and _unconverted(operation.inputs[0]) is _unconverted(
        operation.inputs[1]
    ):
        return operation.inputs[0]
    return (
        operation.inputs[0] if operation.name == "pow" and operation.inputs[1].number == 2 else None
    )


def _unconverted(data: Value) -> Value:
    while data.maker is not None and data.maker.name == "convert_element_type":
        data = data.maker.inputs[0]
    return data


@dataclasses.dataclass
class DefinitionChain:
    """A value and its predecessors.

    Attributes:
      data: the values, latest first.
      operations: the operation that computes each value from the next one in `data`.
    """

    data: list[Value]
    operations: list[Node]


def chain_of(data: Value) -> DefinitionChain:
    chain = DefinitionChain([data], [])
    while (operation := data.maker) is not None:
        following = _through(operation)
        if following is None:
            break
        data = following
        chain.data.append(data)
        chain.operations.append(operation)
    return chain


def _through(operation: Node) -> Value | None:
    """Returns the operand whose numbers an operation moves, scales, shifts or masks.

    Returns None for all other operations.
    """
    name, inputs = operation.name, operation.inputs
    if name in COPIES and inputs:
        return operand_copied(operation)
    if name in SIGN_CHANGES:
        return inputs[0]
    if name == "select_n":
        cases = [data for data in inputs[1:] if not data.yields]
        return cases[0] if len(cases) == 1 else None
    shape = operation.outputs[0].shape
    if name in FORWARD_ADDITIONS:
        kept = [data for data in inputs if not (data.yields or repeats(data, shape))]
    elif name == "mul":
        kept = [data for data in inputs if not is_stored(data, shape)]
    else:
        return inputs[0] if name == "div" and is_stored(inputs[1], shape) else None
    return kept[0] if len(kept) == 1 else None


def operand_copied(operation: Node) -> Value:
    """Returns the operand that an operation of `COPIES` copies: of a conditional, a branch's."""
    return operation.inputs[operation.name == "branch"]


def is_stored(data: Value, shape: tuple[Any, ...]) -> bool:
    """Returns whether a value is a parameter, a number, or an argument broadcast to `shape`."""
    return data.yields or (data.given and repeats(data, shape))


def repeats(data: Value, shape: tuple[Any, ...], depth: int = _DEEPEST) -> bool:
    """Returns whether a value that is read in `shape` repeats numbers."""
    if data.shape != shape:
        return True
    operation = data.maker
    if operation is None or not depth:
        return False
    if operation.name in BROADCASTS and operation.inputs[0].shape != shape:
        return True
    if operation.name in COPIES:
        return repeats(operand_copied(operation), operand_copied(operation).shape, depth - 1)
    if operation.name not in ELEMENTWISE:
        return False
    floats = [operand for operand in operation.inputs if operand.is_float]
    return bool(floats) and all(repeats(operand, shape, depth - 1) for operand in floats)


def meeting(chain: DefinitionChain, other: DefinitionChain) -> Value | None:
    """Returns the first value of a chain that is also in the other, or None.

    Values made of parameters alone are skipped.
    """
    of_other = set(other.data)
    return next((data for data in chain.data if data in of_other and not data.yields), None)

"""Equality of values, as far as the program shows it."""

from __future__ import annotations

from policy.inspect.audit.values import made_of
from policy.programs.primitives import REARRANGES
from policy.programs.reading.graph import Value, is_joint


def are_equal(one: Value, other: Value, depth: int = 12) -> bool:
    """Returns whether the program shows that two values hold the same numbers.

    They do if they are rearrangements of one value, or results of the same operations on equal
    operands.

    Args:
      depth: the longest chain of operations that is compared.
    """
    one, other = (made_of(v, lambda node: node.name in REARRANGES) for v in (one, other))
    if one is other:
        return True
    first, second = one.maker, other.maker
    if first is None or second is None or not depth or is_joint(first) or is_joint(second):
        return one.is_literal and other.is_literal and bool(one.array == other.array)
    if first.name != second.name or len(first.inputs) != len(second.inputs) or not first.inputs:
        return False
    if str(first.params) != str(second.params) or _index(one) != _index(other):
        return False
    return all(are_equal(a, b, depth - 1) for a, b in zip(first.inputs, second.inputs, strict=True))


def _index(value: Value) -> int:
    """Returns the position of a value among the results of its operation."""
    return 0 if value.maker is None else [out is value for out in value.maker.outputs].index(True)

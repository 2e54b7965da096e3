"""Sums of many terms written as additions: chains, trees, scans of pairs, rings of devices."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from policy.inspect.audit.equality import are_equal
from policy.inspect.audit.finding_kinds import REDUCTION, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import is_cotangent, is_matmul, is_narrow, users
from policy.programs.operations import size
from policy.programs.primitives import ADDITIONS, MOVES_DATA, PLACES
from policy.programs.reading.graph import Node, Value, is_joint

_MOST_ALIKE = 3  # parts of one array: a sum of the four corners of a square is reported
_MOST = 7  # terms of any kind, such as branches of a network
_MOST_HOPS = 1  # between devices: a stencil exchanges with its neighbours once


class _Terms(NamedTuple):
    """The terms that each element of a value is a sum of.

    Attributes:
      of: the number of terms that come from each value, by its id.
      hops: the largest number of exchanges between devices on the way of a term.
    """

    of: Counter[int]
    hops: int = 0


def sums_by_hand(flow: Flow) -> Iterator[Finding]:
    """Yields long sums that are written as additions in half precision.

    They have four or more parts of one array as terms, eight or more terms in all, or terms that
    pass along a ring of devices. A partial sum with a reader other than an addition counts as one
    term: the partial sums of a residual stream have such readers.
    """
    sums = _Sums()
    for node in flow.graph.nodes:
        if is_cotangent(node) or is_joint(node):
            continue
        if not node.outputs or not is_narrow(node.out.dtype):
            continue
        sums.enter(node)
        if node.name not in ADDITIONS or not sums.ends(node.out):
            continue
        if terms := _many(sums.known[id(node.out)]):
            dtype = node.out.dtype
            limit = "overflows above 65504" if dtype == "float16" else f"rounds to {dtype}"
            message = (
                f"Additions sum {terms} in {dtype}, one after another: each {limit}. Cast the "
                "terms to float32 before, or stack them and use jnp.sum, which does so; cast the "
                "sum back after."
            )
            yield finding(REDUCTION, node, message)


def _many(terms: _Terms) -> str:
    """Returns the number of terms of a long sum, in words; "" for a short one."""
    total, alike = terms.of.total(), max(terms.of.values(), default=0)
    if terms.hops > _MOST_HOPS and total > 2:
        return f"{total} terms along a ring of devices"
    if alike > _MOST_ALIKE:
        return f"{alike} parts of one array"
    return f"{total} terms" if total > _MOST else ""


class _Sums:
    """The terms of the values of a program."""

    def __init__(self) -> None:
        self.known: dict[int, _Terms] = {}
        self._used: dict[int, bool] = {}

    def enter(self, node: Node) -> None:
        """Records the terms of a node's result, if the node adds or moves numbers."""
        each = [self._of(value) for value in node.inputs]
        hops = max((terms.hops for terms in each), default=0)
        if node.name in ADDITIONS and not all(map(_is_padded, node.inputs)):
            self.known[id(node.out)] = _Terms(sum((one.of for one in each), Counter()), hops)
        elif node.name in ADDITIONS or node.name in PLACES:  # side by side: the largest numbers
            of = functools.reduce(operator.or_, (one.of for one in each), Counter[int]())
            self.known[id(node.out)] = _Terms(of, hops)
        elif node.name in MOVES_DATA and each:
            moved = each[0]._replace(hops=each[0].hops + (node.name == "ppermute"))
            self.known.update((id(out), moved) for out in node.outputs)

    def ends(self, value: Value) -> bool:
        """Returns whether a sum is no partial sum of another one."""
        return self._is_used(value) or not any(node.name in ADDITIONS for node in _readers(value))

    def _of(self, value: Value) -> _Terms:
        terms = self.known.get(id(value))
        if value.is_literal or not is_narrow(value.dtype):
            return _Terms(Counter())
        if terms is None or (terms.of.total() > 1 and self._is_used(value)):
            return _Terms(Counter((id(_whole(value)),)))
        return terms

    def _is_used(self, value: Value) -> bool:
        """Returns whether a value has a reader other than an addition."""
        if id(value) not in self._used:
            self._used[id(value)] = any(
                node.name not in ADDITIONS and not is_joint(node) for node in _readers(value)
            )
        return self._used[id(value)]


def _whole(value: Value) -> Value:
    """Returns the array that a value is part of, or a function of a part; otherwise the value."""
    part, is_part = value, False
    while part.maker is not None:
        operands = [operand for operand in part.maker.inputs if not operand.is_literal]
        is_moved = part.maker.name in MOVES_DATA and bool(operands)
        is_function = bool(operands) and operands[0].shape == part.shape
        is_function = is_function and all(are_equal(operands[0], other) for other in operands[1:])
        if is_joint(part.maker) or is_matmul(part.maker) or not (is_moved or is_function):
            break
        is_part = is_part or (is_moved and size(operands[0].shape) > size(part.shape))
        part = operands[0]
    return part if is_part else value


def _is_padded(value: Value) -> bool:
    """Returns whether a value was padded with zeros: an addition of two such values joins them."""
    return value.maker is not None and value.maker.name == "pad"


def _readers(value: Value) -> Iterator[Node]:
    """Yields the nodes that compute with a value, looking through data movement."""
    return users(value, lambda node: node.name in MOVES_DATA or node.name in PLACES)

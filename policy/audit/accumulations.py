"""Shares of a carried value in its next one: finds sums over the turns of a loop, or over calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import NamedTuple

from policy._jaxpr.equations import combines_by
from policy._jaxpr.graph import Node, Value, is_joint
from policy._jaxpr.operations import kind_of
from policy._jaxpr.primitives import ADDITIONS, EXTREMES, MOVES_DATA, PRODUCTS, UPDATES
from policy.audit.flow import is_cast, is_cotangent, reached, users

_ZEROS = UPDATES | {"pad"}  # values written into zeros add to few places
_DEEP = 100  # sums of sums that are followed


class Share(NamedTuple):
    """The part of a value that is a carry's.

    Attributes:
      factor: times the carry. Of a number that the program computes, only the sign is taken: it
        counts as positive.
      is_exact: whether the factor is known.
      added: whether anything was added to the carry.
      scaled: whether it was multiplied by anything.
    """

    factor: float
    is_exact: bool = True
    added: bool = False
    scaled: bool = False


_NOTHING = Share(0.0)


class _Below(enum.Enum):
    """Operations between a value and the next carry: none, a factor, or a sum of two shares."""

    NOTHING = enum.auto()
    SCALE = enum.auto()
    SUM = enum.auto()


class Shares:
    """The shares of one carry in the values of one turn.

    Args:
      carry: the carry at the start of a turn.
      gates: ids of values on which no factor of a sum depends: a factor that does is a gate.
      scales: whether the carry may be multiplied.
      gradients: whether a gradient by the carry counts as independent of it.
      statistics: whether the carry's norm or mean, as a factor of what is added, counts as
        independent of it.
      counts: whether the operands beside the carry in an addition count as something that is added.

    Attributes:
      sums: the additions that were found between the carry and the value in question, the last one
        first.
    """

    def __init__(
        self,
        carry: Value,
        gates: Collection[int],
        *,
        scales: bool = True,
        gradients: bool = True,
        statistics: bool = False,
        counts: Callable[[list[Value]], bool] = lambda terms: True,
    ):
        self.carry, self._scales, self._counts = carry, scales, counts
        is_gradient = lambda node: gradients and is_cotangent(node)  # noqa: E731
        is_hidden = lambda node: is_gradient(node) or (statistics and _is_statistic(node))  # noqa: E731
        self._is_made_of_carry = Dependence((id(carry),), is_hidden)
        self._gates = Dependence((id(carry), *gates), is_gradient)
        self._others = Dependence(gates, is_gradient)
        self._known: dict[tuple[int, _Below], Share | None] = {}
        self.sums: list[Node] = []

    def of(self, value: Value) -> Share | None:
        """Returns the share of the carry in a value, or None.

        It is None where the value is no sum of the carry and of other terms. The terms of the sum
        do not depend on the carry. Adding zeros but for a few places is no addition.
        """
        return self._of(value, _Below.NOTHING, depth=0)

    def _of(self, value: Value, below: _Below, depth: int) -> Share | None:
        key = id(value), below
        if key not in self._known:
            self._known[key] = None  # of a value made of itself, nothing is known
            self._known[key] = self._follow(value, below, depth)
        return self._known[key]

    def _follow(self, value: Value, below: _Below, depth: int) -> Share | None:
        found = Share(1.0)
        while value is not self.carry:
            maker = value.maker
            if maker is None or not maker.inputs or depth > _DEEP:
                return None
            mine = [v for v in maker.inputs if self._is_made_of_carry(v)]
            if cases := _cases(maker, mine):
                chosen = self._chosen(cases, below, depth)
                return None if chosen is None else _times(found, chosen)
            if maker.name in ADDITIONS and len(mine) == 2:
                self.sums.append(maker)
                summed = self._summed(maker, depth)
                return None if summed is None else _times(found, summed)
            step = None if is_joint(maker) else self._step(maker, mine, below)
            if step is None:
                return None
            found = _times(found, step)
            below = _Below.SCALE if step.scaled and below is _Below.NOTHING else below
            value = mine[0] if len(mine) == 1 else _counterpart(maker, value)
        return found

    def _step(self, node: Node, mine: list[Value], below: _Below) -> Share | None:
        """Returns the share after one operation of which one operand has a share."""
        others = [v for v in node.inputs if not any(v is one for one in mine)]
        if node.name in ADDITIONS:
            if any(_is_sparse(v) for v in others) or (
                below is _Below.SCALE and any(map(self._others, others))
            ):
                return None
            self.sums.append(node)
            sign = -1.0 if node.name == "sub" and mine == [node.inputs[1]] else 1.0
            return Share(sign, added=self._counts(others))
        if node.name in PRODUCTS:
            is_factor = len(mine) == 1 and not (node.name == "div" and mine[0] is node.inputs[1])
            if not self._scales or not is_factor or any(map(self._gates, others)):
                return None
            number, is_exact = _number(others[0])
            return Share(
                1 / number if node.name == "div" and number else number, is_exact, scaled=True
            )
        if kind_of(node.name) == "scatter-add" or _applies_addition(node):
            self.sums.append(node)
            return Share(1.0, added=True)
        if node.name == "neg":
            return Share(-1.0)
        is_written_into = node.name in UPDATES and mine[0] is node.inputs[0]
        return Share(1.0) if _is_view(node) or is_written_into else None

    def _chosen(self, cases: list[Value], below: _Below, depth: int) -> Share | None:
        """Returns the share where one value or the other is taken, or a part of each."""
        each = [
            self._of(v, below, depth + 1) if self._is_made_of_carry(v) else _NOTHING for v in cases
        ]
        held = [share for share in each if share is None or share.factor]
        if None in held or not held:
            return None
        shares = [share for share in held if share is not None]
        largest = max(shares, key=lambda share: (share.added, share.scaled))
        is_exact = largest.is_exact and all(share.factor == largest.factor for share in shares)
        return largest._replace(is_exact=is_exact)

    def _summed(self, node: Node, depth: int) -> Share | None:
        """Returns the share in a sum of two values that both hold some."""
        first, second = (self._of(v, _Below.SUM, depth + 1) for v in node.inputs)
        if first is None or second is None:
            return None
        other = -second.factor if node.name == "sub" else second.factor
        is_exact = first.is_exact and second.is_exact
        # a carry less some of it, as an average has, is still the carry
        factor = (
            first.factor + other
            if is_exact or first.factor * other > 0
            else max(first.factor, other)
        )
        return Share(factor, is_exact, first.added or second.added, scaled=True)

    def is_compensated(self) -> bool:
        """Returns whether the rounding errors of the additions are kept, as Kahan's sum keeps them.

        That is a difference of two of these: the carry, the sums, and casts of them.
        """
        ends = {id(self.carry), *(id(out) for node in self.sums for out in node.outputs)}
        for value in (out for node in self.sums for out in node.outputs):
            for reader in users(value, _is_view):
                if (
                    reader.name == "sub"
                    and all(id(_uncast(v)) in ends for v in reader.inputs)
                    and _goes_on(reader.out)
                ):
                    return True
        return False


class Dependence:
    """Tells whether values are computed from some others, within one turn of every loop.

    Args:
      on: the ids of the others.
      hides: whether a dependence through a node counts for nothing.
    """

    def __init__(self, on: Collection[int], hides: Callable[[Node], bool] = lambda node: False):
        self._on, self._hides = frozenset(on), hides
        self._independent: set[int] = set()

    def __call__(self, value: Value) -> bool:
        waiting, seen = [value], {id(value)}
        while waiting:
            value = waiting.pop()
            if id(value) in self._on:
                return True
            maker = value.maker
            if maker is None or maker.name == "carry" or self._hides(maker):
                continue
            fresh = [
                v for v in maker.inputs if id(v) not in seen and id(v) not in self._independent
            ]
            seen.update(map(id, fresh))
            waiting.extend(fresh)
        self._independent |= seen
        return False


def _cases(node: Node, mine: list[Value]) -> list[Value]:
    """Returns the values of which a node returns one or the other, or a part of each.

    Nodes that do something else have none.
    """
    if node.name in ("select_n", "branch"):
        return node.inputs[1:]
    if node.name in UPDATES:
        target, update = (
            node.inputs[0],
            node.inputs[1 if node.name == "dynamic_update_slice" else 2],
        )
        if any(v is target for v in mine) and any(v is update for v in mine):
            return [target, update]
    return []


def _times(one: Share, other: Share) -> Share:
    """Returns the share of a share."""
    is_exact = one.is_exact and other.is_exact
    return Share(
        one.factor * other.factor, is_exact, one.added or other.added, one.scaled or other.scaled
    )


def _counterpart(node: Node, value: Value) -> Value:
    """Returns the operand that an operation which moves numbers returns as a value."""
    if len(node.outputs) == len(node.inputs):
        return node.inputs[[out is value for out in node.outputs].index(True)]
    return node.inputs[0]


def _number(value: Value, depth: int = 8) -> tuple[float, bool]:
    """Returns a factor, and whether it is known.

    Of a computed one, the sign alone is read, as far as it is written down.
    """
    if value.is_literal:
        return float(value.array.real), True
    maker = value.maker
    if maker is None or is_joint(maker) or not maker.inputs or not depth:
        return 1.0, False
    if _is_view(maker):
        return _number(maker.inputs[0], depth - 1)
    if maker.name == "neg":
        number, is_exact = _number(maker.inputs[0], depth - 1)
        return -number, is_exact
    if maker.name == "mul":
        (one, first), (other, second) = (_number(operand, depth - 1) for operand in maker.inputs)
        return one * other, first and second
    return 1.0, False


def _is_statistic(node: Node) -> bool:
    return not is_joint(node) and (kind_of(node.name) == "reduction" or node.name in EXTREMES)


def _applies_addition(node: Node) -> bool:
    """Returns whether a node applies a function that adds to places, as ``x.at[i].apply`` does."""
    return node.name == "scatter" and combines_by(node.site.equation, ADDITIONS)


def _is_sparse(value: Value) -> bool:
    return value.maker is not None and value.maker.name in _ZEROS


def _uncast(value: Value) -> Value:
    while value.maker is not None and _is_view(value.maker) and value.maker.inputs:
        value = value.maker.inputs[0]
    return value


def _is_view(node: Node) -> bool:
    return node.name in MOVES_DATA or is_cast(node)


def _goes_on(value: Value) -> bool:
    """Returns whether a value is handed on or returned, be it through sums, casts or selections."""
    passes = lambda node: (
        node.name in ADDITIONS or node.name in ("select_n", "branch") or _is_view(node)
    )  # noqa: E731
    return any(
        each.is_output or any(node.name == "carry" for node in each.readers)
        for each in reached([value], passes)
    )

"""Shares of a carry in its next value: finds sums over the iterations of a loop or over calls."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import NamedTuple

from policy.inspect.audit.values import (
    behind,
    is_cotangent,
    is_view,
    made_of,
    moved_from,
    reached,
    users,
)
from policy.programs.equations import combines_by
from policy.programs.graph import Node, Value, is_joint
from policy.programs.operations import kind_of
from policy.programs.primitives import ADDITIONS, EXTREMES, PRODUCTS, UPDATES

_ZEROS = UPDATES | {"pad"}  # make arrays that are mostly zero
_DEEP = 100  # the deepest nesting of sums that is followed


class Share(NamedTuple):
    """The share of a carry in a value: the value is `factor` times the carry, plus other terms.

    Attributes:
      factor: the coefficient of the carry. Numbers that the program computes count as 1.
      is_exact: whether the coefficient is known.
      added: whether anything was added to the carry.
      scaled: whether the carry was multiplied by anything.
    """

    factor: float
    is_exact: bool = True
    added: bool = False
    scaled: bool = False


_NOTHING = Share(0.0)


class _Below(enum.Enum):
    """Operations between a value and the next carry: none, a scaling, or a sum of two shares."""

    NOTHING = enum.auto()
    SCALE = enum.auto()
    SUM = enum.auto()


class Shares:
    """Computes the shares of one carry in the values of one loop iteration.

    Args:
      carry: the carry at the start of the iteration.
      gates: ids of the values that gate others. A carry has no share if it is multiplied by a
        factor that depends on a gate or on the carry, or if a sum with a term that depends on a
        gate is scaled.
      scales: whether the carry may be multiplied.
      gradients: whether gradients with respect to the carry count as independent of it.
      statistics: whether reductions of the carry, such as its norm or mean, count as independent of
        it in the terms added to it.
      counts: tells whether the other operands of an addition count as added terms.

    Attributes:
      sums: the additions found between the carry and the value in question, the last one first.
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

        The share is None unless the value is the sum of a multiple of the carry and of terms
        independent of the carry. It is also None if a term is zero in most places, as a padded one
        is.
        """
        return self._of(value, _Below.NOTHING, depth=0)

    def _of(self, value: Value, below: _Below, depth: int) -> Share | None:
        key = id(value), below
        if key not in self._known:
            self._known[key] = None  # a value that depends on itself has no known share
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
            value = mine[0] if len(mine) == 1 else moved_from(maker, value)
        return found

    def _step(self, node: Node, mine: list[Value], below: _Below) -> Share | None:
        """Returns the share of an operand in the result of one operation, or None."""
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
        return Share(1.0) if is_view(node) or is_written_into else None

    def _chosen(self, cases: list[Value], below: _Below, depth: int) -> Share | None:
        """Returns the share in a result that is selected or assembled from several values."""
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
        """Returns the share in a sum of two values that both hold a share."""
        first, second = (self._of(v, _Below.SUM, depth + 1) for v in node.inputs)
        if first is None or second is None:
            return None
        other = -second.factor if node.name == "sub" else second.factor
        is_exact = first.is_exact and second.is_exact
        # an average subtracts a part of the carry from the carry: a share remains
        factor = (
            first.factor + other
            if is_exact or first.factor * other > 0
            else max(first.factor, other)
        )
        return Share(factor, is_exact, first.added or second.added, scaled=True)

    def is_compensated(self) -> bool:
        """Returns whether the additions keep their rounding errors, as Kahan summation does.

        They do if a difference of two of these reaches the next carry or an output: the carry, the
        sums, and casts of them.
        """
        ends = {id(self.carry), *(id(out) for node in self.sums for out in node.outputs)}
        for value in (out for node in self.sums for out in node.outputs):
            for reader in users(value, is_view):
                if (
                    reader.name == "sub"
                    and all(id(made_of(v, is_view)) in ends for v in reader.inputs)
                    and _goes_on(reader.out)
                ):
                    return True
        return False


class Dependence:
    """Tells whether values depend on some others, within one iteration of every loop.

    Args:
      on: the ids of the others.
      hides: tells whether the results of a node count as independent of its operands.
    """

    def __init__(self, on: Collection[int], hides: Callable[[Node], bool] = lambda node: False):
        self._on, self._hides = frozenset(on), hides
        self._independent: set[int] = set()

    def __call__(self, value: Value) -> bool:
        seen = set[int]()
        for one in behind(value, self._operands):
            if id(one) in self._on:
                return True
            seen.add(id(one))
        self._independent |= seen
        return False

    def _operands(self, node: Node) -> list[Value]:
        if node.name == "carry" or self._hides(node):
            return []
        return [value for value in node.inputs if id(value) not in self._independent]


def _cases(node: Node, mine: list[Value]) -> list[Value]:
    """Returns the operands that a node selects from or assembles its result from.

    Returns [] for other nodes, and for updates unless both target and update are in `mine`.
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


def _number(value: Value, depth: int = 8) -> tuple[float, bool]:
    """Returns a factor, and whether it is known.

    A computed factor counts as 1, multiplied by the literals and signs that the program applies to
    it.
    """
    if value.is_literal:
        return float(value.array.real), True
    maker = value.maker
    if maker is None or is_joint(maker) or not maker.inputs or not depth:
        return 1.0, False
    if is_view(maker):
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
    """Returns whether a node adds to elements in place, as ``x.at[i].apply`` may do."""
    return node.name == "scatter" and combines_by(node.site.equation, ADDITIONS)


def _is_sparse(value: Value) -> bool:
    return value.maker is not None and value.maker.name in _ZEROS


def _goes_on(value: Value) -> bool:
    """Returns whether a value reaches a carry or an output through sums, casts or selections."""
    passes = lambda node: (  # noqa: E731
        node.name in ADDITIONS or node.name in ("select_n", "branch") or is_view(node)
    )
    return any(
        each.is_output or any(node.name == "carry" for node in each.readers)
        for each in reached([value], passes)
    )

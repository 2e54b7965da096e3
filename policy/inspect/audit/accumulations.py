"""Shares of a carry in its next value: finds sums over the iterations of a loop or over calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from policy.inspect.audit.values import (
    in_order,
    is_cotangent,
    is_selection,
    is_view,
    made_of,
    moved_from,
    reached,
    users,
)
from policy.programs.jaxprs import combines_by
from policy.programs.operations import kind_of
from policy.programs.primitives import ADDITIONS, EXTREMES, PRODUCTS, UPDATES
from policy.programs.reading.graph import Node, Value, is_joint

_ZEROS = UPDATES | {"pad"}  # make arrays that are mostly zero


class Share(NamedTuple):
    """The share of a carry in a value: the value is `factor` times the carry, plus other terms.

    Attributes:
      factor: the coefficient of the carry. Numbers that the program computes count as 1.
      is_exact: whether the coefficient is known.
      scaled: whether the carry was multiplied by anything.
      is_gated: whether a term that depends on a gate was added.
      is_gate_scaled: whether such a sum was multiplied by anything.
      sums: the additions on the way from the carry, the last one first, and the terms of each.
    """

    factor: float
    is_exact: bool = True
    scaled: bool = False
    is_gated: bool = False
    is_gate_scaled: bool = False
    sums: Mapping[Node, tuple[Value, ...]] = {}

    @property
    def terms(self) -> list[Value]:
        """The terms that were added to the carry."""
        return [term for terms in self.sums.values() for term in terms]


def share_of(
    carry: Value,
    value: Value,
    gates: Collection[int],
    *,
    scales: bool = True,
    gradients: bool = True,
    statistics: bool = False,
) -> Share | None:
    """Returns the share of a carry in a value of the same iteration of a loop, or None.

    It is None unless the value is the sum of a multiple of the carry and of terms independent of
    the carry. It is also None if a term is zero in most places, as a padded one is, and if the sum
    keeps its rounding errors.

    Args:
      carry: the carry at the start of the iteration.
      value: the value in question.
      gates: ids of the values that gate others. A carry has no share if it is multiplied by a
        factor that depends on a gate or on the carry, or if a sum with a term that depends on a
        gate is scaled.
      scales: whether the carry may be multiplied.
      gradients: whether gradients with respect to the carry count as independent of it.
      statistics: whether reductions of the carry, such as its norm or mean, count as independent of
        it in the terms added to it.
    """
    shares: dict[int, Share | None] = {id(carry): Share(1.0)}
    gated = {id(carry), *gates}
    for node in in_order(value, lambda node: not (gradients and is_cotangent(node))):
        if any(id(one) in gated for one in node.inputs):
            gated.update(map(id, node.outputs))
        mine = [one for one in node.inputs if id(one) in shares]
        if mine and not (statistics and _is_statistic(node)):
            for out in node.outputs:
                shares[id(out)] = _made(node, out, mine, shares, gated, scales)
    share = shares.get(id(value))
    is_none = share is None or share.is_gate_scaled or _is_compensated(carry, share)
    return None if is_none else share


def _made(
    node: Node,
    out: Value,
    mine: list[Value],
    shares: Mapping[int, Share | None],
    gated: Collection[int],
    scales: bool,
) -> Share | None:
    """Returns the share in a result of an operation on values that depend on the carry."""
    if cases := _cases(node, mine):
        return _chosen([shares.get(id(one), Share(0.0)) for one in cases])
    if node.name in ADDITIONS and len(mine) == 2:
        return _summed(node, *(shares[id(one)] for one in node.inputs))
    share = shares[id(mine[0] if len(mine) == 1 else moved_from(node, out))]
    if share is None or is_joint(node):
        return None
    others = tuple(one for one in node.inputs if not any(one is each for each in mine))
    if node.name in PRODUCTS:
        is_factor = len(mine) == 1 and not (node.name == "div" and mine[0] is node.inputs[1])
        is_free = scales and is_factor and not any(id(one) in gated for one in others)
        return _scaled(share, node, others[0]) if is_free else None
    if node.name in ADDITIONS and any(map(_is_sparse, others)):
        return None
    if node.name in ADDITIONS or kind_of(node.name) == "scatter-add" or _applies_addition(node):
        is_negative = node.name == "sub" and mine[0] is node.inputs[1]
        return share._replace(
            factor=-share.factor if is_negative else share.factor,
            is_gated=share.is_gated or any(id(one) in gated for one in others),
            sums={node: others, **share.sums},
        )
    if node.name == "neg":
        return share._replace(factor=-share.factor)
    is_written_into = node.name in UPDATES and mine[0] is node.inputs[0]
    return share if is_view(node) or is_written_into else None


def _cases(node: Node, mine: list[Value]) -> list[Value]:
    """Returns the operands that a node selects from or assembles its result from.

    Returns [] for other nodes, and for updates unless both target and update are in `mine`.
    """
    if is_selection(node):
        return node.inputs[1:]
    if node.name in UPDATES:
        update = node.inputs[1 if node.name == "dynamic_update_slice" else 2]
        parts = [node.inputs[0], update]
        return parts if all(any(one is each for each in mine) for one in parts) else []
    return []


def _chosen(shares: list[Share | None]) -> Share | None:
    """Returns the share in a result that is selected or assembled from values with shares."""
    held = [share for share in shares if share is not None and share.factor]
    if None in shares or not held:
        return None
    largest = max(held, key=lambda share: (bool(share.terms), share.scaled))
    return largest._replace(
        is_exact=all(one.is_exact and one.factor == largest.factor for one in held),
        is_gated=any(one.is_gated for one in held),
        is_gate_scaled=any(one.is_gate_scaled for one in held),
        sums={node: terms for one in held for node, terms in one.sums.items()},
    )


def _summed(node: Node, first: Share | None, second: Share | None) -> Share | None:
    """Returns the share in a sum of two values that both hold a share."""
    if first is None or second is None:
        return None
    other = -second.factor if node.name == "sub" else second.factor
    is_exact = first.is_exact and second.is_exact
    # an average subtracts a part of the carry from the carry: a share remains
    factor = (
        first.factor + other if is_exact or first.factor * other > 0 else max(first.factor, other)
    )
    return Share(factor, is_exact, scaled=True, sums={node: (), **first.sums, **second.sums})


def _scaled(share: Share, node: Node, by: Value) -> Share:
    """Returns the share in a product with a factor, or in a quotient by it."""
    number, is_exact = _number(by)
    number = 1 / number if node.name == "div" and number else number
    return share._replace(
        factor=share.factor * number,
        is_exact=share.is_exact and is_exact,
        scaled=True,
        is_gate_scaled=share.is_gated,
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


def _is_compensated(carry: Value, share: Share) -> bool:
    """Returns whether the additions keep their rounding errors, as Kahan summation does.

    They do if a difference of two of these reaches the next carry or an output: the carry, the
    sums, and casts of them.
    """
    sums = [out for node in share.sums for out in node.outputs]
    ends = {id(carry), *map(id, sums)}
    differences = (node for value in sums for node in users(value, is_view) if node.name == "sub")
    return any(
        all(id(made_of(one, is_view)) in ends for one in node.inputs) and _goes_on(node.out)
        for node in differences
    )


def _is_statistic(node: Node) -> bool:
    return not is_joint(node) and (kind_of(node.name) == "reduction" or node.name in EXTREMES)


def _applies_addition(node: Node) -> bool:
    """Returns whether a node adds to elements in place, as ``x.at[i].apply`` may do."""
    return node.name == "scatter" and combines_by(node.site.equation, ADDITIONS)


def _is_sparse(value: Value) -> bool:
    return value.maker is not None and value.maker.name in _ZEROS


def _goes_on(value: Value) -> bool:
    """Returns whether a value reaches a carry or an output through sums, casts or selections."""
    passes = lambda node: node.name in ADDITIONS or is_selection(node) or is_view(node)  # noqa: E731
    return any(
        each.is_output or any(node.name == "carry" for node in each.readers)
        for each in reached([value], passes)
    )

"""Sums that loops carry, or that one call returns for the next, in half precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from policy.inspect.audit.findings import CARRY, Finding, finding, shape_of
from policy.inspect.audit.flow import (
    Flow,
    State,
    behind,
    followed,
    in_order,
    is_cotangent,
    is_matmul,
    is_narrow,
    is_selection,
    is_view,
    made_of,
    moved_from,
    reached,
    users,
    views,
)
from policy.inspect.traced.authors import written_at
from policy.inspect.traced.program_facts import combines_by
from policy.programs import primitives as ops
from policy.programs.dtypes import is_inexact_name
from policy.programs.reading.graph import Node, Value, is_joint

_ZEROS = ops.UPDATES | {"pad"}  # make arrays that are mostly zero
_MOST = 0.5  # the smallest share, if known, that counts as a running average


def narrowed_carries(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision carries that are sums or averages.

    The activations that a stack of layers hands on are exempt, because the terms added to them
    depend on them. Carries that a gate scales are exempt too.
    """
    loops: dict[int, list[Node]] = defaultdict(list)
    for node in flow.graph.nodes:
        # Its inputs are the first value, and the result of the body for it.
        is_carry = node.name == "carry" and node.outputs and len(node.inputs) == 2
        if is_carry and node.params.get("length") != 1:
            loops[id(node.site.equation)].append(node)
    for carries in loops.values():
        gates = _gates_of((node.out, node.inputs[1]) for node in carries)
        for node in carries:
            if is_narrow(node.out.dtype) and _is_added_to(node, gates):
                message = (
                    f"{shape_of(node.out)} is carried from one iteration of the {node.site.name} "
                    "to the next, and is added to or scaled in each: terms below its last digit "
                    "are lost. Carry it in float32."
                )
                yield finding(CARRY, node, message)


def _is_added_to(node: Node, gates: set[Value]) -> bool:
    """Returns whether a carry is added to or scaled.

    Gradients with respect to the carry count as independent of it: adding them is an optimizer
    step. In the backward pass only sums count, because cotangents are scaled there.
    """
    is_forward = not node.site.is_backward
    share = share_of(node.out, node.inputs[1], gates, scales=is_forward, gradients=is_forward)
    return share is not None and bool(share.factor) and (share.scaled or bool(share.sums))


def _gates_of(carried: Iterator[tuple[Value, Value]]) -> set[Value]:
    """Returns the carries that may be gates, of pairs of a carry and its next value.

    Counters are no gates: sums may be scaled by them. Nor are running maxima: an online softmax
    rescales its sums when the maximum grows.
    """
    floats = (pair for pair in carried if is_inexact_name(pair[0].dtype))
    return {carry for carry, result in floats if not _is_extreme(carry, result)}


def _is_extreme(carry: Value, result: Value) -> bool:
    """Returns whether a carry is a running maximum or minimum."""
    maker = made_of(result, is_view).maker
    if maker is None or maker.name not in ops.MINMAX - {"clamp"}:
        return False
    return any(carry in views(value, is_view) for value in maker.inputs)


# --------------------------------------------------------------------------------------------------
# State that one call returns for the next
# --------------------------------------------------------------------------------------------------


def narrowed_states(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision params, averages and statistics that each call adds to.

    A residual stream is not state, because the terms added to it depend on it. Gradients with
    respect to a state may be added to it. Params are exempt if master weights, or their rounding
    errors, are kept beside them.
    """
    arguments, outputs = flow.graph.arguments, flow.graph.outputs
    pairs = {one: (arguments[one.argument], outputs[one.output]) for one in flow.states}
    changed = {one: pair for one, pair in pairs.items() if pair[0] is not pair[1]}
    # Scalars are hyperparameters.
    gates = _gates_of(pair for pair in changed.values() if pair[0].shape)
    sums: dict[int, tuple[State, Node] | None] = {}
    for state, pair in changed.items():
        is_known = sums.setdefault(state.output, None) is not None
        if not is_known and (node := _sum(*pair, gates)) is not None:
            sums[state.output] = state, node
    found: dict[tuple[str, ...], list[tuple[State, Node]]] = defaultdict(list)
    for state, node in filter(None, sums.values()):
        dtype = arguments[state.argument].dtype
        key = (*node.path, written_at(node.site.equation), node.name, dtype)
        found[key].append((state, node))
    for (first, node), *others in found.values():
        more = f" and {len(others)} more" if others else ""
        message = (
            f"{first.name}, {shape_of(arguments[first.argument])}{more}: each call adds to it and "
            "returns it for the next call. Terms below its last digit are lost each time. Keep it "
            "in float32; for parameters, policy.mixed_precision stores what rounding would lose."
        )
        yield finding(CARRY, node, message)


def _sum(before: Value, after: Value, gates: set[Value]) -> Node | None:
    """Returns the addition that makes the next value of a half-precision state, or None."""
    if not is_narrow(before.dtype):
        return None
    share = share_of(before, after, gates)
    if share is None or share.factor <= 0 or (share.is_exact and share.factor < _MOST):
        return None
    is_counter = not before.shape  # a counter of calls adds a literal
    if not share.terms or not (is_counter or any(_is_new(term, before) for term in share.terms)):
        return None
    made = followed(share.terms, _operands)
    products = (one for one in made if one.maker is not None and is_matmul(one.maker))
    multiplied = [operand for one in products for operand in _operands(one)]
    if before in followed(multiplied, _operands):
        return None
    return next((node for node in share.sums if not is_cotangent(node)), None)


def _operands(value: Value) -> list[Value]:
    """Returns the operands that the forward pass computes a value of."""
    return [] if value.maker is None or is_cotangent(value.maker) else value.maker.inputs


def _is_new(value: Value, state: Value) -> bool:
    """Returns whether a term depends on an input of the call other than the state itself.

    Constants and random noise do not count: images are shifted and perturbed, too.
    """

    def others(node: Node) -> list[Value]:
        return [] if node.name in ops.DRAWS else [v for v in node.inputs if v is not state]

    return value is not state and any(
        one.maker is None and one.array is None for one in behind(value, others)
    )


# --------------------------------------------------------------------------------------------------
# The share of a carry in its next value
# --------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The share of a carry in a value: the value is `factor` times the carry, plus other terms.

    Attributes:
      factor: the coefficient of the carry. Numbers that the program computes count as 1.
      is_exact: whether the coefficient is known.
      scaled: whether the carry was multiplied by anything.
      sums: the additions on the way from the carry, the last one first, and the terms of each.
    """

    factor: float
    is_exact: bool = True
    scaled: bool = False
    sums: Mapping[Node, tuple[Value, ...]] = {}

    @property
    def terms(self) -> list[Value]:
        """The terms that were added to the carry."""
        return [term for terms in self.sums.values() for term in terms]


def share_of(
    carry: Value,
    value: Value,
    gates: Collection[Value],
    *,
    scales: bool = True,
    gradients: bool = True,
) -> Share | None:
    """Returns the share of a carry in a value of the same iteration of a loop, or None.

    It is None unless the value is the sum of a multiple of the carry and of terms independent of
    the carry. It is also None if a term is zero in most places, as a padded one is, and if the sum
    keeps its rounding errors.

    Args:
      carry: the carry at the start of the iteration.
      value: the value in question.
      gates: the values that gate others. A carry has no share if it is multiplied by a factor that
        depends on a gate or on the carry.
      scales: whether the carry may be multiplied.
      gradients: whether gradients with respect to the carry count as independent of it.
    """
    shares: dict[Value, Share | None] = {carry: Share(1.0)}
    gated = {carry, *gates}
    for node in in_order(value, lambda node: not (gradients and is_cotangent(node))):
        if not gated.isdisjoint(node.inputs):
            gated.update(node.outputs)
        mine = [one for one in node.inputs if one in shares]
        if mine:
            shares.update(
                (out, _made(node, out, mine, shares, gated, scales)) for out in node.outputs
            )
    share = shares.get(value)
    return None if share is None or _is_compensated(carry, share) else share


def _made(
    node: Node,
    out: Value,
    mine: list[Value],
    shares: Mapping[Value, Share | None],
    gated: Collection[Value],
    scales: bool,
) -> Share | None:
    """Returns the share in a result of an operation on values that depend on the carry."""
    if cases := _cases(node, mine):
        return _chosen([shares.get(one, Share(0.0)) for one in cases])
    is_addition = node.name in ops.ADDITIONS
    if is_addition and len(mine) == 2:
        return _summed(node, *(shares[one] for one in node.inputs))
    share = shares[mine[0] if len(mine) == 1 else moved_from(node, out)]
    if share is None or is_joint(node):
        return None
    others = tuple(one for one in node.inputs if one not in mine)
    is_right = len(node.inputs) > 1 and mine[0] is node.inputs[1]
    if node.name in ops.PRODUCTS:
        is_factor = len(mine) == 1 and not (node.name == "div" and is_right)
        is_free = scales and is_factor and not any(one in gated for one in others)
        return _scaled(share, node, others[0]) if is_free else None
    if is_addition and any(one.maker is not None and one.maker.name in _ZEROS for one in others):
        return None
    # `x.at[i].apply` may add to elements in place.
    applies = node.name == "scatter" and combines_by(node.site.equation, ops.ADDITIONS)
    if is_addition or applies or node.kind == "scatter-add":
        return share._replace(
            factor=-share.factor if node.name == "sub" and is_right else share.factor,
            sums={node: others, **share.sums},
        )
    if node.name == "neg":
        return share._replace(factor=-share.factor)
    is_written_into = node.name in ops.UPDATES and mine[0] is node.inputs[0]
    return share if is_view(node) or is_written_into else None


def _cases(node: Node, mine: list[Value]) -> list[Value]:
    """Returns the operands that a node selects from or assembles its result from.

    Returns [] for other nodes, and for updates unless both target and update are in `mine`.
    """
    if is_selection(node):
        return node.inputs[1:]
    if node.name in ops.UPDATES:
        parts = [node.inputs[0], node.inputs[1 if node.name == "dynamic_update_slice" else 2]]
        return parts if all(one in mine for one in parts) else []
    return []


def _chosen(shares: list[Share | None]) -> Share | None:
    """Returns the share in a result that is selected or assembled from values with shares."""
    held = [share for share in shares if share is not None and share.factor]
    if None in shares or not held:
        return None
    largest = max(held, key=lambda share: (bool(share.terms), share.scaled))
    return largest._replace(
        is_exact=all(one.is_exact and one.factor == largest.factor for one in held),
        sums={node: terms for one in held for node, terms in one.sums.items()},
    )


def _summed(node: Node, first: Share | None, second: Share | None) -> Share | None:
    """Returns the share in a sum of two values that both hold a share."""
    if first is None or second is None:
        return None
    factor, other = first.factor, -second.factor if node.name == "sub" else second.factor
    is_exact = first.is_exact and second.is_exact
    # an average subtracts a part of the carry from the carry: a share remains
    factor = factor + other if is_exact or factor * other > 0 else max(factor, other)
    return Share(factor, is_exact, scaled=True, sums={node: (), **first.sums, **second.sums})


def _scaled(share: Share, node: Node, by: Value) -> Share:
    """Returns the share in a product with a factor, or in a quotient by it."""
    # A number that the program computes counts as 1.
    number, is_exact = (float(by.array.real), True) if by.is_literal else (1.0, False)
    return share._replace(
        factor=share.factor / number if node.name == "div" and number else share.factor * number,
        is_exact=share.is_exact and is_exact,
        scaled=True,
    )


def _is_compensated(carry: Value, share: Share) -> bool:
    """Returns whether the additions keep their rounding errors, as Kahan summation does.

    They do if a difference of two of these reaches the next carry or an output: the carry, the
    sums, and casts of them.
    """
    sums = [out for node in share.sums for out in node.outputs]
    ends = {carry, *sums}
    differences = (node for value in sums for node in users(value, is_view) if node.name == "sub")
    return any(
        all(made_of(one, is_view) in ends for one in node.inputs) and _goes_on(node.out)
        for node in differences
    )


def _goes_on(value: Value) -> bool:
    """Returns whether a value reaches a carry or an output through sums, casts or selections."""
    passes = lambda node: node.name in ops.ADDITIONS or is_selection(node) or is_view(node)  # noqa: E731
    return any(
        each.is_output or any(node.name == "carry" for node in each.readers)
        for each in reached([value], passes)
    )

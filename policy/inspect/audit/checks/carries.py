"""Loop carries that lose digits in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from policy.inspect.audit.accumulations import Share, share_of
from policy.inspect.audit.finding_kinds import CARRY, finding, shape_of
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import (
    behind,
    is_narrow,
    is_selection,
    is_view,
    made_of,
    narrows,
    users,
    views,
    widens,
)
from policy.programs.dtypes import is_inexact_name
from policy.programs.operations import kind_of
from policy.programs.primitives import ADDITIONS, MINMAX, SCALINGS
from policy.programs.reading.graph import Node, Value

_MIXES = ADDITIONS | SCALINGS  # operations of sums and averages


def narrowed_carries(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision carries that are sums, averages, or float32 rounded at each iteration.

    The activations that a stack of layers hands on are exempt, because the terms added to them
    depend on them. Carries that a gate scales are exempt too.
    """
    loops: dict[int, list[Node]] = {}
    for node in flow.graph.nodes:
        if node.name == "carry" and node.outputs and len(node.inputs) == 2:
            loops.setdefault(id(node.site.equation), []).append(node)
    for carries in loops.values():
        if carries[0].params.get("length") != 1:
            yield from _Loop(carries).findings()


class _Loop:
    """The carries of one loop.

    Each node makes one carry: its inputs are the first value, and the result of the body for it.
    """

    def __init__(self, carries: list[Node]):
        self.carries = carries
        self.gates = gates_of((node.out, node.inputs[1]) for node in carries)

    def findings(self) -> Iterator[Finding]:
        for node in self.carries:
            if is_narrow(node.out.dtype) and (message := self._message(node)):
                yield finding(CARRY, node, message)

    def _message(self, node: Node) -> str:
        carry, maker, readers = node.out, node.inputs[1].maker, list(users(node.out))
        what = (
            f"{shape_of(carry)} is carried from one iteration of the {node.site.name} to the next"
        )
        if self._is_added_to(node):
            return (
                f"{what}, and is added to or scaled in each: terms below its last digit are lost. "
                "Carry it in float32."
            )
        if maker is not None and narrows(maker) and readers and all(map(widens, readers)):
            return (
                f"{what}, but is used in {maker.inputs[0].dtype} only: each iteration rounds it. "
                "Carry it in float32."
            )
        return ""

    def _is_added_to(self, node: Node) -> bool:
        """Returns whether a carry is added to or scaled, by itself or where carries swap places."""
        passed, is_changed = [node], False
        while (source := self._source(passed[-1])) is not None:
            other, share = source
            is_changed = is_changed or share.scaled or bool(share.sums)
            if other is node:
                return is_changed
            if other in passed:
                return False
            passed.append(other)
        return False

    def _source(self, node: Node) -> tuple[Node, Share] | None:
        """Returns the carry that another one's next value is a multiple or sum of, and its share.

        Gradients with respect to the carry count as independent of it: adding them is an optimizer
        step. In the backward pass only sums count, because cotangents are scaled there.
        """
        is_forward = not node.site.is_backward
        ends = _ends(node.inputs[1], {id(other.out) for other in self.carries})
        is_own = id(node.out) in ends
        others = [one for one in self.carries if id(one.out) in ends and not is_own]
        for other in (node, *others):
            share = share_of(
                other.out, node.inputs[1], self.gates, scales=is_forward, gradients=is_forward
            )
            if share is not None and share.factor:
                return other, share
        return None


def gates_of(carried: Iterator[tuple[Value, Value]]) -> set[int]:
    """Returns the ids of carries that may be gates, of pairs of a carry and its next value.

    Counters are no gates: sums may be scaled by them. Nor are running maxima: an online softmax
    rescales its sums when the maximum grows.
    """
    return {
        id(carry)
        for carry, result in carried
        if is_inexact_name(carry.dtype) and not _is_extreme(carry, result)
    }


def _is_extreme(carry: Value, result: Value) -> bool:
    """Returns whether a carry is a running maximum or minimum."""
    maker = made_of(result, is_view).maker
    if maker is None or maker.name not in MINMAX - {"clamp"}:
        return False
    return any(one is carry for value in maker.inputs for one in views(value, is_view))


def _ends(value: Value, carries: set[int]) -> set[int]:
    """Returns the ids of the carries that a value is made of by sums, scaling and selections."""

    def terms(node: Node) -> list[Value]:
        mixes = node.name in _MIXES or is_selection(node) or kind_of(node.name) == "scatter-add"
        return node.inputs if mixes or is_view(node) else []

    return {id(one) for one in behind(value, terms)} & carries

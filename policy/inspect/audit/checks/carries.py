"""Loop carries that lose digits in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from policy.inspect.audit.accumulations import Share, Shares
from policy.inspect.audit.finding_kinds import CARRY, finding, shape_of
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import (
    behind,
    is_narrow,
    is_view,
    made_of,
    narrows,
    users,
    views,
    widens,
)
from policy.programs.graph import Node, Value
from policy.programs.operations import is_inexact_name, kind_of
from policy.programs.primitives import ADDITIONS, MINMAX, SCALINGS

_MIXES = ADDITIONS | SCALINGS | {"select_n", "branch"}  # operations of sums and averages


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
        self._swapped: dict[int, list[tuple[Node, Share]]] = {}

    def findings(self) -> Iterator[Finding]:
        for node in self.carries:
            if is_narrow(node.out.dtype) and (message := self._message(node)):
                yield finding(CARRY, node, message)

    def _message(self, node: Node) -> str:
        carry, result = node.out, node.inputs[1]
        what = (
            f"{shape_of(carry)} is carried from one iteration of the {node.site.name} to the next"
        )
        if self._adds(node, node) or self._is_added_to_elsewhere(node):
            return (
                f"{what}, and is added to or scaled in each: terms below its last digit are lost. "
                "Carry it in float32."
            )
        maker = result.maker
        readers = list(users(carry))
        is_wide_inside = bool(readers) and all(widens(r) for r in readers)
        if maker is not None and narrows(maker) and is_wide_inside:
            return (
                f"{what}, but is used in {maker.inputs[0].dtype} only: each iteration rounds it. "
                "Carry it in float32."
            )
        return ""

    def _adds(self, node: Node, to: Node) -> bool:
        """Returns whether a carry's next value is another carry, added to or scaled."""
        share = self._share(node, to)
        return share is not None and (share.added or share.scaled)

    def _share(self, node: Node, of: Node) -> Share | None:
        """Returns the share of a carry in the next value of another one; None if it is compensated.

        Gradients with respect to the carry count as independent of it: adding them is an optimizer
        step. In the backward pass only sums count, because cotangents are scaled there.
        """
        is_forward = not node.site.is_backward
        shares = Shares(of.out, self.gates, scales=is_forward, gradients=is_forward)
        share = shares.of(node.inputs[1])
        return None if share is None or not share.factor or shares.is_compensated() else share

    def _is_added_to_elsewhere(self, node: Node) -> bool:
        """Returns whether a carry is added to in a cycle of carries that swap places."""
        waiting: list[tuple[Node, tuple[Node, ...], bool]] = [(node, (), False)]
        while waiting:
            here, passed, is_added_to = waiting.pop()
            for other, share in self._sources(here):
                is_changed = is_added_to or share.added or share.scaled
                if other is node and passed and is_changed:
                    return True
                if other is not node and not any(other is one for one in passed):
                    waiting.append((other, (*passed, other), is_changed))
        return False

    def _sources(self, node: Node) -> list[tuple[Node, Share]]:
        """Returns the other carries that a carry's next value is a sum of, and their shares."""
        if id(node) not in self._swapped:
            ends = _ends(node.inputs[1], {id(other.out) for other in self.carries})
            others = (
                []
                if id(node.out) in ends
                else [other for other in self.carries if id(other.out) in ends]
            )
            shares = [(other, self._share(node, other)) for other in others]
            self._swapped[id(node)] = [
                (other, share) for other, share in shares if share is not None
            ]
        return self._swapped[id(node)]


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
        mixes = node.name in _MIXES or kind_of(node.name) == "scatter-add"
        return node.inputs if mixes or is_view(node) else []

    return {id(one) for one in behind(value, terms)} & carries

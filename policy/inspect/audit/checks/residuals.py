"""Residuals that the forward pass keeps in float32 where half precision would do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from policy.inspect.audit.finding_kinds import RESIDUAL, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import is_cast, is_cotangent, is_matmul, is_wide
from policy.programs.costs import array_bytes
from policy.programs.graph import Node, Value, is_joint
from policy.programs.operations import is_steep, kind_of, sums
from policy.programs.paths import Path
from policy.programs.primitives import ADDITIONS, MOVES_DATA, POWERS, SQUARE_ROOTS


def float32_residuals(flow: Flow) -> Iterator[Finding]:
    """Yields float32 residuals that elementwise arithmetic made of half-precision values.

    Arithmetic that is in float32 for a reason is exempt: normalisations, softmaxes, losses,
    anything else with a sum or an exponential, and residual streams that add one value to another.
    """
    if not flow.multiplies_in_half:
        return
    regions = _Regions(flow)
    kept: dict[tuple[str, ...], list[Value]] = defaultdict(list)
    for node in flow.graph.nodes:
        if (
            is_cotangent(node)
            or node.site.is_backward
            or is_matmul(node)
            or node.name in MOVES_DATA
        ):
            continue
        for value in node.outputs:
            is_saved = (
                is_wide(value.dtype) and value.shape and any(is_cotangent(r) for r in value.readers)
            )
            if is_saved and flow.widening(value) is not None and not regions.has_reason(node):
                kept[node.site.path].append(value)
    for values in kept.values():
        makers = [value.maker for value in values if value.maker is not None]
        saved = sum(
            array_bytes(v.aval) * m.site.count * m.site.devices
            for v, m in zip(values, makers, strict=True)
        )
        origin = flow.widening(values[0])
        half = "half" if origin is None else origin.inputs[0].dtype
        arrays = (
            f"{len(values)} {values[0].dtype} {'arrays are' if len(values) > 1 else 'array is'}"
        )
        why = f"computed elementwise from {half}: saving {half} would take half of that"
        message = f"{saved:,} bytes in {arrays} saved for the backward pass, {why}."
        yield finding(RESIDUAL, makers[0], message, (half, values[0].dtype))


_Key = tuple[int, Path]


class _Regions:
    """Connected regions of float32 arithmetic within one module, and the reasons for float32.

    The regions include dead code: a loss that nobody reads is not computed, but it is a reason for
    the residuals of its gradient.
    """

    def __init__(self, flow: Flow):
        self.flow = flow
        self.parents: dict[_Key, _Key] = {}
        self.reasons: set[_Key] = set()
        nodes = [
            n for n in flow.graph.traced if not (is_cotangent(n) or is_joint(n) or is_matmul(n))
        ]
        for node in nodes:
            # The nodes that make or read one value form one region.
            for value in (*node.inputs, *node.outputs):
                if is_wide(value.dtype) and not value.is_literal:
                    self._join((id(node), ()), (id(value), node.site.path))
        for node in nodes:
            if self._is_reason(node):
                self.reasons.add(self._root((id(node), ())))

    def has_reason(self, node: Node) -> bool:
        """Returns whether the residual of a node has a reason to be float32.

        The result of a conditional has one if any of its branches does.
        """
        makers = (
            [value.maker for value in node.inputs if value.maker is not None]
            if node.name == "branch"
            else [node]
        )
        return any(self._root((id(maker), ())) in self.reasons for maker in makers)

    def _is_reason(self, node: Node) -> bool:
        wide = [value for value in node.outputs if is_wide(value.dtype)]
        if any(
            is_matmul(reader) and not is_cotangent(reader)
            for value in wide
            for reader in value.readers
        ):
            return True  # the float32 matmul is a finding of its own
        if not any(is_wide(value.dtype) for value in node.inputs) or is_cast(node):
            return False
        if node.name in ADDITIONS:
            arrays = [value for value in node.inputs if not value.is_literal]
            return len({id(self.flow.widening(value)) for value in arrays}) > 1
        if node.name in POWERS:  # float16 lacks the range for powers
            origin = self.flow.widening(node.inputs[0])
            return origin is not None and origin.inputs[0].dtype == "float16"
        is_root = node.name in SQUARE_ROOTS
        return (
            sums(node.site.equation)
            or is_root
            or is_steep(node.name)
            or kind_of(node.name) == "opaque"
        )

    def _root(self, node: _Key) -> _Key:
        root = node
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        while node != root:
            self.parents[node], node = root, self.parents.get(node, node)
        return root

    def _join(self, one: _Key, other: _Key) -> None:
        self.parents[self._root(one)] = self._root(other)

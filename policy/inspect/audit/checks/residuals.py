"""Residuals that the forward pass keeps in float32 where half precision would do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from policy.inspect.audit.finding_kinds import RESIDUAL, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import is_cast, is_cotangent, is_matmul, is_wide
from policy.programs.operations import array_bytes, is_steep, kind_of, sums
from policy.programs.paths import Path
from policy.programs.primitives import ADDITIONS, MOVES_DATA, POWERS, SQUARE_ROOTS
from policy.programs.reading.graph import Node, Value, is_joint


def float32_residuals(flow: Flow) -> Iterator[Finding]:
    """Yields float32 residuals that elementwise arithmetic made of half-precision values.

    Arithmetic that is in float32 for a reason is exempt: normalisations, softmaxes, losses,
    anything else with a sum or an exponential, and residual streams that add one value to another.
    """
    if not flow.multiplies_in_half:
        return
    meant = _meant_nodes(flow)
    kept: dict[Path, list[tuple[Node, Value]]] = defaultdict(list)
    for node in flow.graph.nodes:
        # The result of a conditional is meant if that of any branch is.
        makers = [value.maker for value in node.inputs] if node.name == "branch" else [node]
        is_view = is_cotangent(node) or node.site.is_backward or node.name in MOVES_DATA
        if is_view or is_matmul(node) or not meant.isdisjoint(makers):
            continue
        for value in node.outputs:
            is_saved = is_wide(value.dtype) and any(map(is_cotangent, value.readers))
            if is_saved and value.shape and flow.widening(value) is not None:
                kept[node.site.path].append((node, value))
    for saved in kept.values():
        yield finding(RESIDUAL, saved[0][0], *_told(flow, saved))


def _told(flow: Flow, saved: list[tuple[Node, Value]]) -> tuple[str, tuple[str, ...]]:
    """Returns the message about the residuals of a module, and their dtypes."""
    sites = [(node.site, array_bytes(value.aval)) for node, value in saved]
    size = sum(each * site.count * site.devices for site, each in sites)
    _, first = saved[0]
    origin = flow.widening(first)
    half = "half" if origin is None else origin.inputs[0].dtype
    arrays = f"{len(saved)} {first.dtype} {'arrays are' if len(saved) > 1 else 'array is'}"
    why = f"computed elementwise from {half}: saving {half} would take half of that"
    message = f"{size:,} bytes in {arrays} saved for the backward pass, {why}."
    return message, (half, first.dtype)


def _meant_nodes(flow: Flow) -> set[Node | None]:
    """Returns the nodes whose arithmetic, with that around it in a module, is meant to be float32.

    Dead code counts: a loss that nobody reads is not computed, but it is a reason for the residuals
    of its gradient.
    """
    near: dict[tuple[int, Path], list[Node]] = defaultdict(list)
    for node in flow.graph.traced:
        if not (is_cotangent(node) or is_joint(node) or is_matmul(node)):
            for value in _wide_values(node):
                near[id(value), node.site.path].append(node)
    waiting = [node for nodes in near.values() for node in nodes if _is_reason(node, flow)]
    found = set[Node | None]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            for value in _wide_values(node):
                waiting += near.pop((id(value), node.site.path), ())
    return found


def _wide_values(node: Node) -> list[Value]:
    values = (*node.inputs, *node.outputs)
    return [value for value in values if is_wide(value.dtype) and not value.is_literal]


def _is_reason(node: Node, flow: Flow) -> bool:
    """Returns whether a node is a reason for the float32 arithmetic around it."""
    readers = [r for v in node.outputs if is_wide(v.dtype) for r in v.readers]
    if any(is_matmul(reader) and not is_cotangent(reader) for reader in readers):
        return True  # the float32 matmul is a finding of its own
    if not any(is_wide(value.dtype) for value in node.inputs) or is_cast(node):
        return False
    origin = flow.widening(node.inputs[0])
    if node.name in ADDITIONS:
        arrays = [value for value in node.inputs if not value.is_literal]
        return len({id(flow.widening(value)) for value in arrays}) > 1
    if node.name in POWERS:  # float16 lacks the range for powers
        return origin is not None and origin.inputs[0].dtype == "float16"
    is_function = node.name in SQUARE_ROOTS or is_steep(node.name)
    return sums(node.site.equation) or is_function or kind_of(node.name) == "opaque"

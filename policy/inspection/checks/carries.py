"""What loops hand on in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from policy.inspection.flow import LAYOUT, Flow, is_cast, is_narrow, narrows, users, widens
from policy.inspection.graph import Node, Value, is_joint
from policy.inspection.kinds import CARRY, finding, shape_of
from policy.inspection.operations import is_inexact, kind_of
from policy.inspection.report import Finding

_ADDS = frozenset(("add", "sub", "add_any"))
_SCALES = frozenset(("mul", "div"))
_ZEROS = frozenset(("dynamic_update_slice", "pad", "scatter"))  # what is written into zeros adds to few places


def narrowed_carries(flow: Flow) -> Iterator[Finding]:
    """Running sums and averages in half precision, and float32 that is rounded to half between two turns of a loop.

    What a stack of layers hands on is neither: what each adds depends on it. Nor is what a gate scales.
    """
    loops: dict[int, list[Node]] = {}
    for node in flow.graph.nodes:
        if node.name == "carry" and node.outputs and len(node.inputs) == 2:
            loops.setdefault(id(node.site.equation), []).append(node)
    for carries in loops.values():
        if carries[0].params.get("length") == 1:
            continue
        of_loop = {id(node.out) for node in carries if is_inexact(node.out.dtype)}  # counters may scale
        for node in carries:
            if is_narrow(node.out.dtype) and (message := _message(node, of_loop)):
                yield finding(CARRY, node, message)


def _message(node: Node, of_loop: set[int]) -> str:
    carry, result = node.out, node.inputs[1]
    what = f"{shape_of(carry)} is handed from one turn of the {node.site.name} to the next"
    if _accumulates(result, carry, of_loop, node.site.is_backward):
        return f"{what}, and is added to or scaled in each: what is below its last digit is lost. Carry float32."
    maker = result.maker
    readers = list(users(carry))
    is_wide_inside = bool(readers) and all(widens(r) for r in readers)
    if maker is not None and narrows(maker) and is_wide_inside:
        return f"{what}, but computed with in {maker.inputs[0].dtype} only: each turn rounds it. Carry float32."
    return ""


def _accumulates(result: Value, carry: Value, of_loop: set[int], is_backward: bool) -> bool:
    """Whether what the body returns is its carry plus terms that do not depend on it, as a sum has, or scaled by such
    factors, as an average is. In the backward pass only sums are: what is scaled there is a cotangent."""
    return _change(result, carry, of_loop, scaled=False, scales=not is_backward) is True


def _change(value: Value, carry: Value, of_loop: set[int], scaled: bool, scales: bool) -> bool | None:
    """Whether a value is a carry that was added to or scaled; False of the carry as it was, None of anything else."""
    changed = False
    while value is not carry:
        maker = value.maker
        if maker is None or is_joint(maker) or not maker.inputs:
            return None
        mine = [v for v in maker.inputs if _depends(v, {id(carry)})]
        others = [v for v in maker.inputs if v not in mine]
        if maker.name == "select_n" or (maker.name in _ADDS and len(mine) == 2):
            cases = maker.inputs[1:] if maker.name == "select_n" else mine
            each = [_change(v, carry, of_loop, scaled, scales) for v in cases]
            return None if None in each else changed or maker.name in _ADDS or any(each)
        if maker.name in _ADDS:
            if any(_is_sparse(v) for v in others) or (scaled and any(_depends(v, of_loop) for v in others)):
                return None
        elif maker.name in _SCALES:
            if not scales or len(mine) != 1 or any(_depends(v, of_loop) for v in others):
                return None
            scaled = True
        elif kind_of(maker.name) != "scatter-add" and maker.name not in LAYOUT and not is_cast(maker):
            return None
        changed = changed or not (maker.name in LAYOUT or is_cast(maker))
        value = mine[0] if len(mine) == 1 else maker.inputs[0]
    return changed


def _is_sparse(value: Value) -> bool:
    return value.maker is not None and value.maker.name in _ZEROS


def _depends(value: Value, on: set[int]) -> bool:
    """Whether a value is computed from some of a loop's carries, within one turn."""
    waiting, seen = [value], {id(value)}
    while waiting:
        value = waiting.pop()
        if id(value) in on:
            return True
        if value.maker is None or (value.maker.name == "carry"):
            continue
        for operand in value.maker.inputs:
            if id(operand) not in seen:
                seen.add(id(operand))
                waiting.append(operand)
    return False

"""Half precision that becomes float32, and what follows: promotions, leaks, matmuls, residuals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from policy.core.scope import computes_in_half
from policy.inspect.audit import findings as kinds
from policy.inspect.audit.findings import Finding, finding, shape_of
from policy.inspect.audit.flow import (
    Flow,
    is_cast,
    is_complex,
    is_cotangent,
    is_matmul,
    is_narrow,
    is_wide,
    made_of,
    makers,
    operands,
    users,
    views,
)
from policy.inspect.traced.authors import is_promotion, source_of_site
from policy.inspect.traced.equation_facts import (
    array_bytes,
    float32_precision_of,
    flops_of,
    size,
    sums,
)
from policy.programs import primitives as ops
from policy.programs.paths import Path, spelled
from policy.programs.reading.graph import Node, Value, is_joint

_FAR = 64  # values that are searched behind a matmul's operand


def silent_promotions(flow: Flow) -> Iterator[Finding]:
    """Yields half values promoted by another operand, without a cast, whose result stays wide.

    A Flax normalization is exempt: its half input meets float32 statistics, but the result is
    narrowed. A layer that was asked for float32 is exempt too.
    """
    for node in flow.forward:
        is_cast = node.name == "convert_element_type" and is_narrow(node.inputs[0].dtype)
        if not is_cast or node.site.is_placed or node.out not in flow.leaking:
            continue
        if is_wide(node.out.dtype) and flow.asked.is_wide(node.path):
            continue
        half, (reader, other) = node.inputs[0], next(_meetings(node.out), (None, None))
        if reader is None or other is None or not is_promotion(node.site.equation):
            continue
        message = (
            f"{shape_of(half)} is combined with {shape_of(other)} in {reader.name}: the result is "
            f"{node.out.dtype} and stays so. Cast one of the two first."
        )
        dtypes = tuple(dict.fromkeys((half.dtype, other.dtype, node.out.dtype)))
        yield finding(kinds.PROMOTION, node, message, dtypes, reader.name)


def _meetings(value: Value) -> Iterator[tuple[Node, Value]]:
    """Yields the nodes that combine a value with another of its dtype, and that other value."""
    for reader in users(value):
        for other in [] if is_joint(reader) else reader.inputs:
            if other.dtype == value.dtype and made_of(other) is not made_of(value):
                yield reader, other


def mixed_matmuls(flow: Flow) -> Iterator[Finding]:
    """Yields matmuls of a half operand with a float32, float64 or complex one."""
    for node in flow.matmuls:
        dtypes = tuple(value.dtype for value in node.inputs[:2])
        is_mixed = any(is_wide(dtype) or is_complex(dtype) for dtype in dtypes)
        if len(set(dtypes)) == 2 and any(map(is_narrow, dtypes)) and is_mixed:
            message = (
                f"{node.name} multiplies {dtypes[0]} by {dtypes[1]}, as slowly as float32. Cast "
                "both to one dtype; for a float32 result, pass preferred_element_type."
            )
            if node.site.is_backward:
                message += (
                    " In the backward pass, a float32 cotangent causes this: cast the result of "
                    "the matmul in the forward pass."
                )
            yield finding(kinds.MIXED, node, message)


def float32_matmuls(flow: Flow) -> Iterator[Finding]:
    """Yields float32 matmuls beside half-precision ones, and leaks of float32 into matmuls.

    A matmul is reported with its share of the FLOPs, a leak at the place where the operand was
    widened. Matmuls that a rule, a policy or an argument puts in float32 are exempt. Beside no
    half-precision one, those of modules are reported that can't obey the policy in force.
    """
    total = sum(_flops(node) for node in flow.matmuls)
    for node in flow.matmuls:
        wide = [value for value in operands(node)[:2] if is_wide(value.dtype)]
        if not wide or node.site.in_island or flow.asked.is_wide(node.path):
            continue
        sources = [origin for value in wide if (origin := flow.widenings.get(value)) is not None]
        is_computed = any(map(_was_computed, sources))
        if _is_no_work(node, is_computed):
            continue
        is_of_half = flow.multiplies_in_half or len(wide) < 2 or is_computed
        if is_of_half or any(map(_is_normalized, wide)):
            yield from (_leak(node, one) for one in sources if _has_leaked(node, one))
        remedy = flow.asked.remedy(node.path)
        is_missed = remedy and computes_in_half(flow.asked.policy)
        if (flow.multiplies_in_half or is_missed) and len(wide) == 2:
            share = _flops(node) / total if total else 0.0
            message = f"{node.name} runs in float32, with {share:.1%} of the FLOPs of all matmuls."
            why = f" Its operand was widened at {_at(sources[0])}." if sources else ""
            yield finding(kinds.MATMUL, node, f"{message}{why} {remedy}".strip())


def default_precisions(flow: Flow) -> Iterator[Finding]:
    """Yields float32 matmuls at the default precision, where float32 was asked for under half.

    A precision in the policy that was asked for is exempt.
    """
    for node in flow.matmuls:
        path = node.path
        if "default" not in float32_precision_of(node.site.equation).split(", "):
            continue
        is_island = node.site.in_island and flow.asked.is_half(path)
        if not (is_island or flow.asked.is_wide_in_half(path)) or flow.asked.has_precision(path):
            continue
        message = (
            f"{node.name} was asked for in float32, and runs at the default precision: a TPU "
            "multiplies it in bfloat16, a GPU in TF32. Leave out precision=, so that it runs at "
            "the highest; x=default in the rule or policy allows it."
        )
        yield finding(kinds.PRECISION, node, message)


def _is_normalized(value: Value) -> bool:
    """Returns whether a wide value depends on a square root, as a normalized one does."""

    def wide(node: Node) -> list[Value]:
        if is_joint(node) or is_matmul(node):
            return []
        return [value for value in node.inputs if is_wide(value.dtype)]

    return any(maker.name in ops.SQUARE_ROOTS for maker in makers(value, wide, _FAR))


def _leak(node: Node, origin: Node) -> Finding:
    half, wide = origin.inputs[0].dtype, origin.out.dtype
    message = (
        f"A value is widened to {wide} here, and then enters a {node.name} in float32 at "
        f"{_at(node)}. Cast the result back to {half} before it is passed on."
    )
    return finding(kinds.LEAK, origin, message, (half, wide), node.name)


def _at(node: Node) -> str:
    """Returns the position of a node for a message: its module's path and its line."""
    place, line = spelled(node.path), source_of_site(node.site)
    return f"{place} ({line})" if place and line else place or line or "the top level"


def _flops(node: Node) -> int:
    return flops_of(node.site.equation) * node.site.count * node.site.devices


def _is_no_work(node: Node, is_of_half: bool) -> bool:
    """Returns whether a float32 product is too thin for matrix units.

    These are outer products, as of positions and frequencies, and products of a stored array and a
    vector, as in the power iteration of a spectral norm.

    Args:
      is_of_half: whether an operand was computed in half precision, as an activation is.
    """
    numbers = node.params.get("dimension_numbers")
    if node.name != "dot_general" or numbers is None:
        return False
    (contracted, others), (batch, _) = numbers
    left, right = node.inputs[0].shape, node.inputs[1].shape
    depth = math.prod(left[axis] for axis in contracted)
    batches = size([left[axis] for axis in batch])
    rows = size(left) // max(batches * depth, 1)
    columns = size(right) // max(batches * size([right[axis] for axis in others]), 1)
    return depth == 1 or (not is_of_half and min(rows, columns) == 1)


def _has_leaked(node: Node, origin: Node) -> bool:
    """Returns whether a widened value left its module, or was computed with, before its matmul."""
    if is_cotangent(origin) or is_matmul(origin):
        return False
    if origin.path != node.path:
        return not origin.site.is_placed
    return not any(origin.out in views(operand) for operand in operands(node))


def _was_computed(origin: Node) -> bool:
    """Returns whether a value was computed in half precision before it was widened.

    Arguments of the program, and values that loops and conditionals hand on, were not.
    """
    maker = made_of(origin.inputs[0]).maker
    return maker is not None and not is_joint(maker)


# --------------------------------------------------------------------------------------------------
# Residuals
# --------------------------------------------------------------------------------------------------


def float32_residuals(flow: Flow) -> Iterator[Finding]:
    """Yields float32 residuals that elementwise arithmetic made of half-precision values.

    Arithmetic that is in float32 for a reason is exempt: normalizations, softmaxes, losses,
    anything else with a sum or an exponential, and residual streams that add one value to another.
    """
    if not flow.multiplies_in_half:
        return
    meant = _meant_nodes(flow)
    kept: dict[Path, list[tuple[Node, Value]]] = defaultdict(list)
    for node in flow.graph.nodes:
        # The result of a conditional is meant if that of any branch is.
        makers = [value.maker for value in node.inputs] if node.name == "branch" else [node]
        is_view = is_cotangent(node) or node.site.is_backward or node.name in ops.MOVES_DATA
        if is_view or is_matmul(node) or not meant.isdisjoint(makers):
            continue
        for value in node.outputs:
            is_saved = is_wide(value.dtype) and any(map(is_cotangent, value.readers))
            if is_saved and value.shape and flow.widenings.get(value) is not None:
                kept[node.path].append((node, value))
    for saved in kept.values():
        places = [(node.site, array_bytes(value.aval)) for node, value in saved]
        total = sum(each * site.count * site.devices for site, each in places)
        node, first = saved[0]
        origin = flow.widenings.get(first)
        half = "half" if origin is None else origin.inputs[0].dtype
        message = (
            f"{total:,} bytes in {len(saved)} {first.dtype} "
            f"{'arrays are' if len(saved) > 1 else 'array is'} saved for the backward pass, "
            f"computed elementwise from {half}: saving {half} would take half of that."
        )
        yield finding(kinds.RESIDUAL, node, message, (half, first.dtype))


def _meant_nodes(flow: Flow) -> set[Node | None]:
    """Returns the nodes whose arithmetic, with that around it in a module, is meant to be float32.

    Dead code counts: a loss that nobody reads is not computed, but it is a reason for the residuals
    of its gradient.
    """
    near: dict[tuple[Value, Path], list[Node]] = defaultdict(list)
    for node in flow.graph.traced:
        if not (is_cotangent(node) or is_joint(node) or is_matmul(node)):
            for value in _wide_values(node):
                near[value, node.path].append(node)
    waiting = [node for nodes in near.values() for node in nodes if _is_reason(node, flow)]
    found = set[Node | None]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            for value in _wide_values(node):
                waiting += near.pop((value, node.path), ())
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
    origin = flow.widenings.get(node.inputs[0])
    if node.name in ops.ADDITIONS:
        return len({flow.widenings.get(value) for value in node.inputs if not value.is_literal}) > 1
    if node.name in ops.POWERS:  # float16 lacks the range for powers
        return origin is not None and origin.inputs[0].dtype == "float16"
    is_function = node.name in ops.SQUARE_ROOTS or node.name in ops.STEEP
    return sums(node.site.equation) or is_function or node.kind == "opaque"

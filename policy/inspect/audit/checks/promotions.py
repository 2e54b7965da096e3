"""Half precision that meets float32: promotions, leaks and float32 matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterator

from policy.inspect.audit.finding_kinds import (
    LEAK,
    MATMUL,
    MIXED,
    PRECISION,
    PROMOTION,
    at,
    finding,
    shape_of,
)
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import (
    behind,
    is_complex,
    is_cotangent,
    is_matmul,
    is_narrow,
    is_wide,
    made_of,
    operands,
    users,
    views,
    widens,
)
from policy.programs.operations import float32_precision_of, flops_of, size
from policy.programs.primitives import SQUARE_ROOTS
from policy.programs.reading.graph import Node, Value, is_joint
from policy.programs.reading.source_lines import is_promotion

_FAR = 64  # values that are searched behind a matmul's operand


def silent_promotions(flow: Flow) -> Iterator[Finding]:
    """Yields half values promoted by another operand, without a cast, whose result stays wide.

    A Flax normalisation is exempt: its half input meets float32 statistics, but the result is
    narrowed. A layer that was asked for float32 is exempt too.
    """
    for node in flow.graph.nodes:
        is_wider = widens(node) or _makes_complex(node)
        if not is_wider or is_cotangent(node) or node.site.is_placed or not flow.leaks(node.out):
            continue
        if is_wide(node.out.dtype) and flow.asked.is_wide(node.site.path):
            continue
        met = next(_meetings(node.out), None)
        if met is None or not is_promotion(node.site.equation):
            continue
        reader, other = met
        message = (
            f"{shape_of(node.inputs[0])} is combined with {shape_of(other)} in {reader.name}: the "
            f"result is {node.out.dtype} and stays so. Cast one of the two first."
        )
        dtypes = (node.inputs[0].dtype, other.dtype, node.out.dtype)
        yield finding(PROMOTION, node, message, tuple(dict.fromkeys(dtypes)), primitive=reader.name)


def _makes_complex(node: Node) -> bool:
    """Returns whether a node makes a half value complex, as promotion does."""
    return (
        node.name == "convert_element_type"
        and is_narrow(node.inputs[0].dtype)
        and is_complex(node.out.dtype)
    )


def _meetings(value: Value) -> Iterator[tuple[Node, Value]]:
    """Yields the nodes that combine a value with another of its dtype, and that other value."""
    for reader in users(value):
        if is_joint(reader):
            continue
        for other in reader.inputs:
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
            yield finding(MIXED, node, message)


def float32_matmuls(flow: Flow) -> Iterator[Finding]:
    """Yields float32 matmuls beside half-precision ones, and leaks of float32 into matmuls.

    A matmul is reported with its share of the FLOPs, a leak at the place where the operand was
    widened. Matmuls that a rule, a policy or an argument puts in float32 are exempt.
    """
    total = sum(_flops(node) for node in flow.matmuls)
    for node in flow.matmuls:
        wide = [value for value in operands(node)[:2] if is_wide(value.dtype)]
        if not wide or node.site.in_island or flow.asked.is_wide(node.site.path):
            continue
        sources = [origin for value in wide if (origin := flow.widening(value)) is not None]
        if _is_no_work(node, any(map(_was_computed, sources))):
            continue
        is_of_half = flow.multiplies_in_half or len(wide) < 2 or any(map(_was_computed, sources))
        if is_of_half or any(map(_is_normalised, wide)):
            yield from (_leak(node, one) for one in sources if _has_leaked(node, one))
        if flow.multiplies_in_half and len(wide) == 2:
            share = _flops(node) / total if total else 0.0
            why = f" Its operand was widened at {at(sources[0])}." if sources else ""
            message = (
                f"{node.name} runs in float32, with {share:.1%} of the FLOPs of all matmuls.{why}"
            )
            remedy = flow.asked.remedy(node.site.path)
            yield finding(MATMUL, node, f"{message} {remedy}".strip())


def default_precisions(flow: Flow) -> Iterator[Finding]:
    """Yields float32 matmuls at the default precision, where float32 was asked for under half.

    A precision in the policy that was asked for is exempt.
    """
    for node in flow.matmuls:
        path = node.site.path
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
        yield finding(PRECISION, node, message)


def _is_normalised(value: Value) -> bool:
    """Returns whether a wide value depends on a square root, as a normalised one does."""

    def wide(node: Node) -> list[Value]:
        if is_joint(node) or is_matmul(node):
            return []
        return [value for value in node.inputs if is_wide(value.dtype)]

    makers = (one.maker for one in behind(value, wide, _FAR))
    return any(maker is not None and maker.name in SQUARE_ROOTS for maker in makers)


def _leak(node: Node, origin: Node) -> Finding:
    message = (
        f"A value is widened to {origin.out.dtype} here, and then enters a {node.name} in float32 "
        f"at {at(node)}. Cast the result back to {origin.inputs[0].dtype} before it is passed on."
    )
    dtypes = (origin.inputs[0].dtype, origin.out.dtype)
    return finding(LEAK, node, message, dtypes, of=origin, primitive=node.name)


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
    if origin.site.path != node.site.path:
        return not origin.site.is_placed
    return not any(one is origin.out for operand in operands(node) for one in views(operand))


def _was_computed(origin: Node) -> bool:
    """Returns whether a value was computed in half precision before it was widened.

    Arguments of the program, and values that loops and conditionals hand on, were not.
    """
    maker = made_of(origin.inputs[0]).maker
    return maker is not None and not is_joint(maker)

"""Half and float32 that meet: promotions, float32 that leaks on, and matmuls that run in float32
for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from policy._jaxpr.costs import flops_of, size
from policy._jaxpr.graph import Node, Value, is_joint
from policy._jaxpr.origins import is_promotion
from policy._jaxpr.primitives import MOVES_DATA, SQUARE_ROOTS
from policy.audit.finding_kinds import LEAK, MATMUL, MIXED, PROMOTION, at, finding, shape_of
from policy.audit.flow import (
    Flow,
    is_complex,
    is_cotangent,
    is_matmul,
    is_narrow,
    is_wide,
    made_of,
    operands,
    users,
    widens,
)
from policy.audit.report import Finding

_FAR = 64  # values that are looked at behind a matmul


def silent_promotions(flow: Flow) -> Iterator[Finding]:
    """Half values that met float32 where nobody cast, if the float32 is not narrowed before it goes
    on.

    A normalisation of Flax's, whose half input meets float32 statistics and whose result is
    narrowed, is none, and neither is what a layer widens that was asked for float32.
    """
    for node in flow.graph.nodes:
        is_wider = widens(node) or _makes_complex(node)
        if not is_wider or is_cotangent(node) or node.site.is_placed or not flow.leaks(node.out):
            continue
        if is_wide(node.out.dtype) and flow.asked.is_wide(node.site.path):
            continue
        met = next((pair for pair in _meetings(node.out)), None)
        if met is None or not is_promotion(node.site.equation):
            continue
        reader, other = met
        message = (
            f"{shape_of(node.inputs[0])} met {shape_of(other)} in {reader.name}: the result is "
            f"{node.out.dtype}, and "
            "goes on so. Cast the one or the other where they meet."
        )
        dtypes = (node.inputs[0].dtype, other.dtype, node.out.dtype)
        yield finding(PROMOTION, node, message, tuple(dict.fromkeys(dtypes)), primitive=reader.name)


def _makes_complex(node: Node) -> bool:
    """Returns whether a node makes a half value complex, as a meeting with a complex one does."""
    return (
        node.name == "convert_element_type"
        and is_narrow(node.inputs[0].dtype)
        and is_complex(node.out.dtype)
    )


def _meetings(value: Value) -> Iterator[tuple[Node, Value]]:
    """The nodes that compute with a value and with another one of its dtype."""
    for reader in users(value):
        if is_joint(reader):
            continue
        for other in reader.inputs:
            if other.dtype == value.dtype and made_of(other) is not made_of(value):
                yield reader, other


def mixed_matmuls(flow: Flow) -> Iterator[Finding]:
    """Matmuls whose operands have two dtypes."""
    for node in flow.matmuls:
        dtypes = tuple(value.dtype for value in node.inputs[:2])
        is_mixed = any(is_wide(dtype) or is_complex(dtype) for dtype in dtypes)
        if len(set(dtypes)) == 2 and any(map(is_narrow, dtypes)) and is_mixed:
            message = (
                f"{node.name} multiplies {dtypes[0]} by {dtypes[1]}, as slowly as float32. Cast "
                "both to one dtype; "
                "preferred_element_type gives a float32 result without."
            )
            if node.site.is_backward:
                message += " Backward, a float32 cotangent does this: cast the result of the matmul forward."
            yield finding(MIXED, node, message)


def float32_matmuls(flow: Flow) -> Iterator[Finding]:
    """Matmuls in float32 where the rest multiplies in half, with their share of the FLOPs; and
    where the float32 of their operands leaked from. Those that a rule, a policy or an argument puts
    in float32 are none.
    """
    total = sum(_flops(node) for node in flow.matmuls)
    for node in flow.matmuls:
        wide = [value for value in operands(node)[:2] if is_wide(value.dtype)]
        if not wide or node.site.in_island or flow.asked.is_wide(node.site.path):
            continue
        sources = [origin for value in wide if (origin := flow.widening(value)) is not None]
        if _is_no_work(node, any(map(_was_computed, sources))):
            continue
        multiplies_half = flow.multiplies_in_half or len(wide) < 2
        leaks = [origin for origin in sources if _has_leaked(node, origin)]
        if (
            multiplies_half
            or any(map(_was_computed, sources))
            or any(_is_normalised(value) for value in wide)
        ):
            yield from (_leak(node, origin) for origin in leaks)
        if flow.multiplies_in_half and len(wide) == 2:
            share = _flops(node) / total if total else 0.0
            why = f" Its operand was widened at {at(sources[0])}." if sources else ""
            message = f"{node.name} multiplies float32, with {share:.1%} of the FLOPs of all matmuls.{why}"
            yield finding(MATMUL, node, message)


def _is_normalised(value: Value) -> bool:
    """Returns whether a wide value was made by arithmetic with an inverse root, as a
    normalisation's result is.
    """
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _FAR:
        maker = waiting.pop().maker
        if maker is None or is_joint(maker) or is_matmul(maker):
            continue
        if maker.name in SQUARE_ROOTS:
            return True
        fresh = [v for v in maker.inputs if is_wide(v.dtype) and id(v) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)
    return False


def _leak(node: Node, origin: Node) -> Finding:
    message = (
        f"What was widened to {origin.out.dtype} here went on into a {node.name} in float32 at "
        f"{at(node)}. "
        f"Narrow the result to {origin.inputs[0].dtype} before it is handed on."
    )
    dtypes = (origin.inputs[0].dtype, origin.out.dtype)
    return finding(LEAK, node, message, dtypes, of=origin, primitive=node.name)


def _flops(node: Node) -> int:
    return flops_of(node.site.equation) * node.site.count * node.site.devices


def _is_no_work(node: Node, is_of_half: bool) -> bool:
    """Returns whether a float32 product is no work for matrix units: outer, or of a stored array
    and a vector.

    The power iteration of a spectral norm is the second, positions times frequencies is the first.

    Args:
      is_of_half: whether an operand was computed in half, as an activation is.
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
    """Returns whether a value was widened in another module than its matmul, or computed with on
    the way.
    """
    if is_cotangent(origin) or is_matmul(origin):
        return False
    if origin.site.path != node.site.path:
        return not origin.site.is_placed
    views = {id(value) for operand in operands(node) for value in _views(operand)}
    return id(origin.out) not in views


def _views(value: Value) -> Iterator[Value]:
    yield value
    while value.maker is not None and value.maker.name in MOVES_DATA:
        value = value.maker.inputs[0]
        yield value


def _was_computed(origin: Node) -> bool:
    """Returns whether what was widened was the result of arithmetic in half, and no argument of the
    program.
    """
    maker = made_of(origin.inputs[0]).maker
    return maker is not None and not is_joint(maker)

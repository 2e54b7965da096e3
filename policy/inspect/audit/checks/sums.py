"""Sums of many terms in less than float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from policy.inspect.audit.finding_kinds import REDUCTION, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.indices import may_repeat
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import is_narrow
from policy.programs.jaxprs import combines_by
from policy.programs.operations import kind_of, sums
from policy.programs.primitives import ADDITIONS, COMBINES, CUMULATIVE, REDUCTIONS, WINDOWED
from policy.programs.reading.graph import Node, is_joint

# Windows that may overlap in one element: those of a 3 x 3 max-pool with stride 2 are 4.
_FEW_WINDOWS = 8


def low_precision_reductions(flow: Flow) -> Iterator[Finding]:
    """Yields every sum of more than one term below float32, by any primitive."""
    for node in flow.graph.nodes:
        if not node.inputs or not node.outputs or not sums(node.site.equation) or is_joint(node):
            continue
        if is_narrow(node.out.dtype) and (terms := terms_of(node)):
            yield finding(REDUCTION, node, _message(node, terms))


def _message(node: Node, terms: str) -> str:
    what = {"scatter-add": "adds up", "collective": "adds up across devices"}.get(
        kind_of(node.name), "sums"
    )
    limit = "overflows above 65504" if node.out.dtype == "float16" else "has 8 significant bits"
    return f"{node.name} {what} {terms} in {node.out.dtype}, which {limit}. {_remedy(node)}"


def _remedy(node: Node) -> str:
    if not node.site.is_backward or node.name != "reduce_sum":
        return "Cast the operand to float32 before, and the result back after."
    return (
        "It is the gradient of a value that the forward pass broadcasts, such as a bias: broadcast "
        "it in float32 and cast the result. Layers of mpmodules do, and Flax's under apply_policy."
    )


def terms_of(node: Node) -> str:
    """Returns the terms of each element of a sum, in words; "" for a single term."""
    kind, shape, params = kind_of(node.name), node.inputs[0].shape, node.params
    sizes: list[Any] = []
    if kind == "scatter-add":
        return _collisions(node)
    if kind == "collective":
        return _shards(node)
    if node.name == "select_and_scatter_add":
        each = zip(params["window_dimensions"], params["window_strides"], strict=True)
        count = math.prod(-(-window // stride) for window, stride in each)
        return f"the gradients of up to {count} windows each" if count > _FEW_WINDOWS else ""
    if node.name in COMBINES and not _adds(node):
        return ""
    if node.name in REDUCTIONS:
        sizes = [shape[axis] for axis in params.get("axes", params.get("dimensions", ()))]
    elif node.name in CUMULATIVE:
        sizes = [shape[params["axis"]]]
    elif node.name in WINDOWED:
        sizes = list(params["window_dimensions"])
    count = math.prod(size if isinstance(size, int) else 2 for size in sizes)
    return f"{count} terms each" if count > 1 else ""


def _shards(node: Node) -> str:
    """Returns the terms that a collective sums, in words; "" if its axes have size 1."""
    axes = node.params.get("axes", node.params.get("axis_name", ()))
    sizes, shape = dict(node.site.axes), node.inputs[0].shape
    each = [
        sizes.get(a) if isinstance(a, str) else shape[a]
        for a in (axes if isinstance(axes, tuple) else (axes,))
    ]
    return "" if each and all(size == 1 for size in each) else "the shards"


def _adds(node: Node) -> bool:
    """Returns whether the function of a general reduction adds or multiplies."""
    return combines_by(node.site.equation, ADDITIONS | {"mul"})


def _collisions(node: Node) -> str:
    """Returns the updates of a scatter that may collide, in words; "" if none can."""
    indices, numbers = node.inputs[1], node.params.get("dimension_numbers")
    if node.params.get("unique_indices") or numbers is None:
        return ""
    batching = set(getattr(numbers, "scatter_indices_batching_dims", ()))
    rows = [dim for axis, dim in enumerate(indices.shape[:-1]) if axis not in batching]
    count = math.prod(dim for dim in rows if isinstance(dim, int))
    if count <= 1 or not may_repeat(indices, tuple(batching)):
        return ""
    places = [node.inputs[0].shape[axis] for axis in numbers.scatter_dims_to_operand_dims]
    return f"{count} updates into {math.prod(p for p in places if isinstance(p, int))} places"

"""Sums of many terms in less than float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from policy.inspect.audit.findings import REDUCTION, Finding, finding, sum_limit
from policy.inspect.audit.flow import LARGEST, Flow, is_narrow, moved_from
from policy.inspect.traced.equation_facts import sums
from policy.inspect.traced.program_facts import combines_by
from policy.programs import primitives as ops
from policy.programs.reading.graph import Node, Value

# Windows that may overlap in one element: those of a 3 x 3 max-pool with stride 2 are 4.
_FEW_WINDOWS = 8
_VERBS = {"scatter-add": "adds up", "collective": "adds up across devices"}
_REMEDY = "Cast the operand to float32 before, and the result back after."
_REMEDY_OF_BROADCASTS = (
    "It is the gradient of a value that the forward pass broadcasts, such as a bias: broadcast it "
    "in float32 and cast the result. Layers of mpmodules do, and Flax's under apply_policy."
)


def low_precision_reductions(flow: Flow) -> Iterator[Finding]:
    """Yields every sum of more than one term below float32, by any primitive."""
    for node in flow.operations:
        if not node.inputs or not node.outputs or not sums(node.site.equation):
            continue
        dtype = node.out.dtype
        if is_narrow(dtype) and (terms := terms_of(node)):
            is_of_broadcast = node.site.is_backward and node.name == "reduce_sum"
            message = (
                f"{node.name} {_VERBS.get(node.kind, 'sums')} {terms} in {dtype}, which "
                f"{sum_limit(dtype)}. {_REMEDY_OF_BROADCASTS if is_of_broadcast else _REMEDY}"
            )
            yield finding(REDUCTION, node, message)


def terms_of(node: Node) -> str:
    """Returns the terms of each element of a sum, in words; "" for a single term."""
    kind, shape, params = node.kind, node.inputs[0].shape, node.params
    sizes: list[Any] = []
    if kind == "scatter-add":
        return _collisions(node)
    if kind == "collective":
        axes = params.get("axes", params.get("axis_name", ()))
        known = dict(node.site.axes)
        each = axes if isinstance(axes, tuple) else (axes,)
        each = [known.get(axis) if isinstance(axis, str) else shape[axis] for axis in each]
        return "" if each and all(size == 1 for size in each) else "the shards"
    if node.name == "select_and_scatter_add":
        each = zip(params["window_dimensions"], params["window_strides"], strict=True)
        count = math.prod(-(-window // stride) for window, stride in each)
        return f"the gradients of up to {count} windows each" if count > _FEW_WINDOWS else ""
    if node.name in ops.COMBINES and not combines_by(node.site.equation, ops.ADDITIONS | {"mul"}):
        return ""
    if node.name in ops.REDUCTIONS:
        sizes = [shape[axis] for axis in params.get("axes", params.get("dimensions", ()))]
    elif node.name in ops.CUMULATIVE:
        sizes = [shape[params["axis"]]]
    elif node.name in ops.WINDOWED:
        sizes = list(params["window_dimensions"])
    count = math.prod(size if isinstance(size, int) else 2 for size in sizes)
    return f"{count} terms each" if count > 1 else ""


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


# --------------------------------------------------------------------------------------------------
# Repeated indices
# --------------------------------------------------------------------------------------------------


Axes = frozenset[int]
_NONE: Axes = frozenset()


def may_repeat(indices: Value, batching: Sequence[int] = ()) -> bool:
    """Returns whether two rows of `indices` (..., k) may be equal.

    Rows are taken to differ along an axis that an `iota` counts along, even if it was moved,
    permuted or wrapped around: reversals, permutations and `arange` have this form. Small constants
    are compared by value, if there are no batching axes.

    Args:
      indices: an integer array whose last axis holds the coordinates of one element.
      batching: batching axes; rows along them address different elements.
    """
    known = _known(indices)
    if known is not None and not batching:
        rows = known.reshape(-1, known.shape[-1])
        return len(np.unique(rows, axis=0)) < len(rows)
    rows_along = {a for a, dim in enumerate(indices.shape[:-1]) if dim != 1 and a not in batching}
    return not rows_along <= _counting(indices, {})


def _known(value: Value) -> np.ndarray | None:
    """Returns the integers of a small array that the program holds, in its own shape, or None.

    A negative index is not replaced by the one that it stands for.
    """
    maker = value.maker
    if maker is None:
        is_read = value.dtype.startswith(("int", "uint")) and not isinstance(value.array, Tracer)
        is_small = value.array is not None and is_read and np.size(value.array) <= LARGEST
        return np.asarray(value.array) if is_small else None
    if maker.name == "select_n":  # an index, or where it is negative its sum with a size
        index, counted = maker.inputs[1], maker.inputs[-1].maker
        is_sum = counted is not None and counted.name == "add" and index in counted.inputs
        return _known(index) if is_sum else None
    if maker.name == "concatenate":
        parts = [part for operand in maker.inputs if (part := _known(operand)) is not None]
        is_whole = len(parts) == len(maker.inputs)
        return np.concatenate(parts, maker.params["dimension"]) if is_whole else None
    found = (
        _known(maker.inputs[0]) if maker.name in ops.CASTS | ops.RESHAPES | ops.BROADCASTS else None
    )
    is_same = found is not None and found.size == math.prod(value.shape)
    return found.reshape(value.shape) if found is not None and is_same else None


def _counting(value: Value, known: dict[Value, Axes]) -> Axes:
    """Returns the axes along which the numbers of a value differ."""
    if value not in known:
        known[value] = _NONE  # a value that depends on itself has no known axes
        known[value] = _NONE if value.maker is None else _of_node(value, value.maker, known)
    return known[value]


def _of_node(value: Value, node: Node, known: dict[Value, Axes]) -> Axes:
    name, params = node.name, node.params
    if name == "iota":
        return frozenset((params["dimension"],))
    if name == "select_n":  # a negative index, and the same one counted from the end
        return frozenset.intersection(*(_counting(v, known) for v in node.inputs[1:]))
    if name == "sort":  # permutes numbers, as argsort does
        return _counting(moved_from(node, value), known)
    if name == "concatenate":
        return frozenset.union(*(_counting(v, known) for v in node.inputs)) - {params["dimension"]}
    if name in ops.INJECTIVE or (name == "mul" and any(v.is_literal for v in node.inputs)):
        return frozenset.union(
            *(_counting(v, known) for v in node.inputs if not v.is_literal), _NONE
        )
    if not node.inputs:
        return _NONE
    axes = _counting(node.inputs[0], known)
    if name == "rem":  # at most as many consecutive numbers as the divisor stay distinct
        largest = max(_literals(node.inputs[1]), default=0)
        return frozenset(a for a in axes if largest >= value.shape[a])
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        return frozenset(places[a] for a in axes)
    if name == "transpose":
        return frozenset(params["permutation"].index(a) for a in axes)
    if name in ops.RESHAPES:
        return _reshaped(axes, node.inputs[0].shape, value.shape)
    return axes if name in ops.KEEPS_AXES else _NONE


def _literals(value: Value) -> list[float]:
    """Returns the literals that a scalar is selected from; [] if it is not."""
    if value.is_literal:
        return [float(value.array)]
    maker = value.maker
    if maker is None or maker.name not in ops.SELECTS_LITERALS:
        return []
    cases = maker.inputs[maker.name == "select_n" :]
    return [number for case in cases for number in _literals(case)]


def _reshaped(axes: Axes, before: Sequence[int], after: Sequence[int]) -> Axes:
    """Returns the positions of axes after a reshape that drops, inserts or joins axes.

    Axes that are split, and those behind them, are left out.
    """
    old = [a for a, dim in enumerate(before) if dim != 1]
    found = set()
    for new, dim in enumerate(after):
        if dim == 1:
            continue
        joined, size = [], 1
        while old and size < dim:
            joined.append(old.pop(0))
            size *= before[joined[-1]]
        if size != dim:
            return frozenset(found)
        if axes.issuperset(joined):
            found.add(new)
    return frozenset(found)

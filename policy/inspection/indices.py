"""Whether the indices of a scatter may name one place twice, as far as the program says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policy.inspection.graph import Node, Value

Axes = frozenset[int]
_NONE: Axes = frozenset()
# Keep different integers different, whatever is added to all of them.
_KEEPING = frozenset(("add", "sub", "neg", "convert_element_type", "copy", "stop_gradient"))


def may_repeat(indices: Value, batching: Sequence[int] = ()) -> bool:
    """Whether two rows of `indices` (..., k) may be equal.

    They are taken to differ along an axis that an `iota` counts along, moved, permuted or wrapped around; that is what
    is left in a program of a reversal, a permutation or an `arange`. Constants are looked at.

    Args:
      indices: an integer array whose last axis holds the coordinates of one place.
      batching: axes of which each is for other places.
    """
    known = _known(indices)
    if known is not None and not batching:
        rows = known.reshape(-1, known.shape[-1])
        return len(np.unique(rows, axis=0)) < len(rows)
    rows_along = {a for a, dim in enumerate(indices.shape[:-1]) if dim != 1 and a not in batching}
    return not rows_along <= _counting(indices, {})


def _known(value: Value) -> np.ndarray | None:
    """The numbers of a constant; None where they are not known."""
    while value.array is None and value.maker is not None and value.maker.name in ("reshape", "convert_element_type"):
        value = value.maker.inputs[0]
    return value.array if isinstance(value.array, np.ndarray) and value.array.ndim else None


def _counting(value: Value, known: dict[int, Axes]) -> Axes:
    """The axes along which the numbers of a value differ."""
    if id(value) not in known:
        known[id(value)] = _NONE  # of what is made of itself, nothing is known
        known[id(value)] = _NONE if value.maker is None else _of_node(value, value.maker, known)
    return known[id(value)]


def _of_node(value: Value, node: Node, known: dict[int, Axes]) -> Axes:
    name, params = node.name, node.params
    if name == "iota":
        return frozenset((params["dimension"],))
    if name == "select_n":  # an index that may be negative, and the same one from the other end
        return frozenset.intersection(*(_counting(v, known) for v in node.inputs[1:]))
    if name == "sort":  # a permutation, as argsort makes it
        return _counting(node.inputs[[out is value for out in node.outputs].index(True)], known)
    if name == "concatenate":
        return frozenset.union(*(_counting(v, known) for v in node.inputs)) - {params["dimension"]}
    if name in _KEEPING or (name == "mul" and any(v.is_literal for v in node.inputs)):
        return frozenset.union(*(_counting(v, known) for v in node.inputs if not v.is_literal), _NONE)
    if not node.inputs:
        return _NONE
    axes = _counting(node.inputs[0], known)
    if name == "rem":  # wraps around once, where it is by the length
        largest = max(_literals(node.inputs[1]), default=0)
        return frozenset(a for a in axes if largest >= value.shape[a])
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        return frozenset(places[a] for a in axes)
    if name == "transpose":
        return frozenset(params["permutation"].index(a) for a in axes)
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(axes, node.inputs[0].shape, value.shape)
    return axes if name in ("rev", "slice") else _NONE


def _literals(value: Value) -> list[float]:
    """The numbers that a scalar is chosen from, where they stand in the program."""
    if value.is_literal:
        return [float(value.array)]
    maker = value.maker
    if maker is None or maker.name not in ("select_n", "convert_element_type", "broadcast_in_dim"):
        return []
    return [number for operand in maker.inputs[maker.name == "select_n" :] for number in _literals(operand)]


def _reshaped(axes: Axes, before: Sequence[int], after: Sequence[int]) -> Axes:
    """Where axes are after a reshape that only drops, puts in or joins some; what was split is no longer known."""
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

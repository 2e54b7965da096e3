"""Repeated indices in a scatter, as far as the program shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.core import Tracer

from policy.inspect.audit.values import moved_from
from policy.programs.primitives import (
    BROADCASTS,
    CASTS,
    INJECTIVE,
    KEEPS_AXES,
    RESHAPES,
    SELECTS_LITERALS,
)
from policy.programs.reading.graph import Node, Value

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


_LARGEST = 4096  # the size of the largest array whose numbers are compared


def _known(value: Value) -> np.ndarray | None:
    """Returns the integers of a small array that the program holds, in its own shape, or None.

    A negative index is not replaced by the one that it stands for.
    """
    maker = value.maker
    if maker is None:
        is_read = value.dtype.startswith(("int", "uint")) and not isinstance(value.array, Tracer)
        is_small = value.array is not None and is_read and np.size(value.array) <= _LARGEST
        return np.asarray(value.array) if is_small else None
    if maker.name == "select_n" and _is_counted_from_end(maker):
        return _known(maker.inputs[1])
    if maker.name == "concatenate":
        parts = [part for operand in maker.inputs if (part := _known(operand)) is not None]
        is_whole = len(parts) == len(maker.inputs)
        return np.concatenate(parts, maker.params["dimension"]) if is_whole else None
    is_moved = maker.name in CASTS | RESHAPES | BROADCASTS
    found = _known(maker.inputs[0]) if is_moved else None
    is_same = found is not None and found.size == math.prod(value.shape)
    return found.reshape(value.shape) if found is not None and is_same else None


def _is_counted_from_end(node: Node) -> bool:
    """Returns whether an index is selected, or where it is negative its sum with a size."""
    counted = node.inputs[-1].maker
    if counted is None or counted.name != "add":
        return False
    return any(one is node.inputs[1] for one in counted.inputs)


def _counting(value: Value, known: dict[int, Axes]) -> Axes:
    """Returns the axes along which the numbers of a value differ."""
    if id(value) not in known:
        known[id(value)] = _NONE  # a value that depends on itself has no known axes
        known[id(value)] = _NONE if value.maker is None else _of_node(value, value.maker, known)
    return known[id(value)]


def _of_node(value: Value, node: Node, known: dict[int, Axes]) -> Axes:
    name, params = node.name, node.params
    if name == "iota":
        return frozenset((params["dimension"],))
    if name == "select_n":  # a negative index, and the same one counted from the end
        return frozenset.intersection(*(_counting(v, known) for v in node.inputs[1:]))
    if name == "sort":  # permutes numbers, as argsort does
        return _counting(moved_from(node, value), known)
    if name == "concatenate":
        return frozenset.union(*(_counting(v, known) for v in node.inputs)) - {params["dimension"]}
    if name in INJECTIVE or (name == "mul" and any(v.is_literal for v in node.inputs)):
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
    if name in RESHAPES:
        return _reshaped(axes, node.inputs[0].shape, value.shape)
    return axes if name in KEEPS_AXES else _NONE


def _literals(value: Value) -> list[float]:
    """Returns the literals that a scalar is selected from; [] if it is not."""
    if value.is_literal:
        return [float(value.array)]
    maker = value.maker
    if maker is None or maker.name not in SELECTS_LITERALS:
        return []
    return [
        number
        for operand in maker.inputs[maker.name == "select_n" :]
        for number in _literals(operand)
    ]


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

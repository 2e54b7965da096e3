"""Ranges of values, by interval arithmetic from the limits that a program itself sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.values import bits, is_selection, moved_from
from policy.programs.primitives import (
    ANNOTATES,
    BOUNDED,
    CASTS,
    EXTREMES,
    MOVES_DATA,
    ORDERS,
    PERIODIC,
    PLACES,
)
from policy.programs.reading.graph import Node, Value, is_joint

_LARGEST = 4096  # the size of the largest captured array that is read
_DEEP = 40  # the longest chain of operations that is followed


class Interval(NamedTuple):
    """The numbers from `low` to `high`."""

    low: float = -math.inf
    high: float = math.inf

    def within(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high


_ANY = Interval()
_UNIT = BOUNDED | PERIODIC | {"sign"}
_KEPT = EXTREMES | ORDERS | CASTS


def interval_of(value: Value, depth: int = _DEEP) -> Interval:
    """Returns an interval that holds all numbers of a value, NaN aside."""
    if value.array is not None:
        return _of_array(value.array)
    held = _of_dtype(value.dtype)
    maker = value.maker
    if maker is None or not depth or not maker.inputs:
        return held
    found = _made(maker, value, lambda one: interval_of(one, depth - 1))
    return Interval(max(held.low, found.low), min(held.high, found.high))


def numbers_in(array: object) -> np.ndarray:
    """Returns the numbers of a small real array, in float64; none of any other object."""
    if not isinstance(array, np.ndarray) or array.size > _LARGEST or np.iscomplexobj(array):
        return np.empty(0)
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    return array.astype(np.float64).ravel() if is_number else np.empty(0)


def _of_array(array: object) -> Interval:
    numbers = numbers_in(array)
    numbers = numbers[~np.isnan(numbers)]
    return Interval(float(numbers.min()), float(numbers.max())) if numbers.size else _ANY


def _of_dtype(dtype: str) -> Interval:
    """Returns the numbers that an array has by its dtype alone: floats of 16 bits or more have any,
    as they may be infinite.
    """
    if dtype == "bool":
        return Interval(0, 1)
    try:
        info = jnp.iinfo(dtype) if "int" in dtype else jnp.finfo(dtype)
    except (TypeError, ValueError):
        return _ANY
    if info.bits > 8 and isinstance(info, jnp.finfo):
        return _ANY
    return Interval(float(info.min), float(info.max))


def _made(node: Node, value: Value, of: Callable[[Value], Interval]) -> Interval:
    name, inputs = node.name, node.inputs
    if name in _UNIT:
        return Interval(-1, 1)
    if name == "carry":
        return _ANY
    if is_selection(node):
        return _union(list(map(of, inputs[1:])))
    if name in PLACES:
        return _union(list(map(of, inputs)))
    if name in MOVES_DATA or name in ANNOTATES or is_joint(node):
        return of(moved_from(node, value))
    if name in _KEPT:  # not the places of the largest, which are integers
        return of(moved_from(node, value)) if bits(value.dtype) or name in CASTS else _ANY
    return _computed(ARITHMETIC[name], list(map(of, inputs))) if name in ARITHMETIC else _ANY


def _union(each: list[Interval]) -> Interval:
    return Interval(min(one.low for one in each), max(one.high for one in each))


def _computed(function: Callable[..., float], operands: list[Interval]) -> Interval:
    """Returns the range of a function that is monotone in each operand, below and above zero."""
    ends = [(*one, 0.0) if one.low < 0 < one.high else one for one in operands]
    with np.errstate(all="ignore"):
        found = [float(function(*each)) for each in itertools.product(*ends)]
    return _ANY if any(map(math.isnan, found)) else Interval(min(found), max(found))


def _product(x: float, y: float) -> float:
    return 0.0 if 0 in (x, y) else x * y  # zero times a limit that is infinite


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "add": np.add,
    "sub": np.subtract,
    "mul": _product,
    "div": lambda x, y: _product(x, 1 / y) if y else math.nan,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
"""Functions of numbers, by primitive."""

"""Integers that half precision rounds: positions, distances, counts and indices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.finding_kinds import INTEGER, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.ranges import interval_of, numbers_in
from policy.inspect.audit.scales import is_constant
from policy.inspect.audit.values import is_cotangent, is_narrow, is_selection, is_sixteen_bits
from policy.programs.operations import size
from policy.programs.primitives import (
    DRAWS,
    EXTREMES,
    FORWARD_ADDITIONS,
    MINMAX,
    MOVES_DATA,
    ROUNDINGS,
    SIGN_CHANGES,
)
from policy.programs.reading.graph import Node, Value, is_joint

_KEEPS = MOVES_DATA | SIGN_CHANGES | EXTREMES | ROUNDINGS | {"row", "rows"}


class _Steps(NamedTuple):
    """Integers in an array, or multiples of one number.

    Attributes:
      largest: the steps from the smallest to the largest; 0 if unknown, and for a single number.
      unit: the size of a step; NaN where it is unknown.
    """

    largest: float = 0
    unit: float = 1


def rounded_integers(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision arrays of more integers, in even steps, than the dtype tells apart.

    Integers count that the program itself makes, scaled or shifted: positions, distances, counts
    and indices. Those of an argument are not known, but their sums and remainders are.
    """
    integers = _Integers()
    for node in flow.graph.nodes:
        integers.enter(node)
        if len(node.outputs) != 1 or is_joint(node) or is_cotangent(node):
            continue
        is_cast = node.name == "convert_element_type" and not is_narrow(node.inputs[0].dtype)
        if not is_sixteen_bits(node.out.dtype) or not (is_cast or node.name == "iota"):
            continue
        many = integers.steps(node.out).largest
        limit = 2 ** (jnp.finfo(node.out.dtype).nmant + 1)
        if many > limit:
            message = (
                f"{many + 1:.0f} integers, or multiples of one number, in {node.out.dtype}, which "
                f"rounds those above {limit}. Compute with them in float32, and cast the result."
            )
            yield finding(INTEGER, node, message)


class _Integers:
    """The steps of the values of a program, and the values that depend on no argument or draw."""

    def __init__(self) -> None:
        self._known: dict[int, _Steps] = {}
        self._fixed: set[int] = set()

    def enter(self, node: Node) -> None:
        """Enters the results of a node."""
        each = list(map(self.steps, node.inputs))
        if all(map(self._is_fixed, node.inputs)) and node.name not in DRAWS:
            self._fixed.update(map(id, node.outputs))
        if len(node.outputs) == len(each) > 1 and (node.name == "sort" or node.name in MOVES_DATA):
            self._known.update((id(v), one) for v, one in zip(node.outputs, each, strict=True))
        elif node.name == "top_k":
            self._known[id(node.outputs[1])] = _Steps(_size(node, (node.params["axis"],)) - 1)
        elif len(node.outputs) == 1:
            self._known[id(node.out)] = self._of(node, each)

    def steps(self, value: Value) -> _Steps:
        if value.array is None or not value.shape:
            return self._known.get(id(value), _Steps())
        numbers = np.unique(numbers_in(value.array))
        is_whole = np.isfinite(numbers).all() and (numbers == np.round(numbers)).all()
        return _Steps(max(numbers.size - 1, 0) if is_whole else 0)

    def _is_fixed(self, value: Value) -> bool:
        return value.array is not None or id(value) in self._fixed

    def _of(self, node: Node, each: list[_Steps]) -> _Steps:
        """Returns the steps of a node's only result, from those of its inputs."""
        is_whole = "int" in node.out.dtype
        match node.name:
            case "iota":
                long = node.params["shape"][node.params["dimension"]]
                return _Steps(long - 1 if isinstance(long, int) else 0)
            case "argmax" | "argmin":
                return _Steps(_size(node, node.params["axes"]) - 1)
            case "convert_element_type":
                return _Steps(1) if node.inputs[0].dtype == "bool" else each[0]
            case "reduce_sum" | "cumsum":
                axes = node.params.get("axes", (node.params.get("axis"),))
                is_counted = is_whole or is_constant(node.inputs[0])
                terms = each[0] if each[0].largest else _Steps(is_counted)
                return terms._replace(largest=terms.largest * _size(node, axes))
            case "scatter-add" if is_whole:
                return _Steps(each[0].largest + size(node.inputs[2].shape))
            case "mul" | "div" | "add" | "sub":
                # With an unknown array of floats, the result is no array of integers.
                is_known = is_whole or all(
                    one.largest or self._is_fixed(value)
                    for one, value in zip(each, node.inputs, strict=True)
                )
                return _combined(node, *each) if is_known and max(each).largest else _Steps()
            case "slice":
                return each[0]._replace(largest=min(each[0].largest, size(node.out.shape) - 1))
            case "carry" if len(each) == 2:
                return _counted(node) or max(each)
            case "min" | "rem" | "clamp":
                return _limited(node, each[node.name == "clamp"])
        if is_selection(node):
            return max(each[1:])
        if node.name in MINMAX or node.name == "concatenate" or (is_joint(node) and each):
            return max(each)
        return each[0] if each and node.name in _KEEPS else _Steps()


def _combined(node: Node, one: _Steps, other: _Steps) -> _Steps:
    """Returns the steps of a sum, product or quotient."""
    if node.name in FORWARD_ADDITIONS:
        unit = min(one.unit, other.unit)
        if not (one.largest and other.largest) or math.isnan(one.unit + other.unit):
            return max(one, other)
        return _Steps((one.largest * one.unit + other.largest * other.unit) / unit, unit)
    left, right = (_unit(steps, v) for steps, v in zip((one, other), node.inputs, strict=True))
    if node.name == "mul":
        is_zero = left * right == 0
        largest = 0 if is_zero else max(one.largest, 1) * max(other.largest, 1)
        return _Steps(largest, 1 if is_zero else left * right)
    if "int" in node.out.dtype and right > 0:
        return _Steps(one.largest * left // right)
    return _Steps(one.largest, left / right) if one.largest and right else _Steps()


def _unit(steps: _Steps, value: Value) -> float:
    """Returns the size of a step, or the magnitude of a single number; NaN where it is unknown."""
    if steps.largest:
        return steps.unit
    low, high = interval_of(value)
    return abs(high) if low == high else math.nan


def _limited(node: Node, number: _Steps) -> _Steps:
    """Returns the steps of a remainder, or of numbers that are limited from above."""
    high = interval_of(node.inputs[-1 if node.name == "clamp" else 1]).high
    if number.largest:
        return number._replace(largest=min(number.largest, abs(high)))
    low, high = (0, high - 1) if node.name == "rem" else interval_of(node.out)
    is_limited = "int" in node.out.dtype and high - low < jnp.iinfo(node.out.dtype).max
    return _Steps(max(high - low, 0)) if is_limited else _Steps()


def _counted(node: Node) -> _Steps | None:
    """Returns the steps of a counter of the iterations of a loop."""
    after, length = node.inputs[1].maker, node.params.get("length")
    if after is None or after.name != "add" or not isinstance(length, int):
        return None
    one, other = after.inputs
    is_counter = one is node.out and other.is_literal
    return _Steps(length, abs(float(other.array))) if is_counter else None


def _size(node: Node, axes: tuple[int, ...]) -> int:
    return size([node.inputs[0].shape[axis] for axis in axes])

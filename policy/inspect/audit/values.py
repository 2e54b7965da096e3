"""Values of a program: their dtypes, walks from one to another, equality and ranges."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from policy.programs import primitives as ops
from policy.programs.dtypes import is_eight_bits as is_eight_bits
from policy.programs.operations import kind_of
from policy.programs.reading.graph import Node, Value, is_joint, readers_past
from policy.programs.reading.matmul_operands import is_cotangent as is_cotangent

Passes = Callable[[Node], bool]
"""Tells whether a walk goes on through a node."""

OperandsOf = Callable[[Node], Iterable[Value]]
"""Gives the operands of a node that a walk goes on with."""

LARGEST = 4096  # the size of the largest captured array that is read
_DEEP = 40  # the longest chain of operations that is followed
_UNIT = ops.BOUNDED | ops.PERIODIC | {"sign"}
_KEPT = ops.MOVES_DATA | ops.ANNOTATES | ops.CASTS | {"row", "rows"}
_ORDERED = ops.EXTREMES | ops.ORDERS


@functools.cache
def bits(dtype: str) -> int:
    """Returns the width in bits of a real floating dtype, by its name; 0 for any other."""
    found = re.match(r"b?float(\d+)", dtype)
    return int(found[1]) if found else 0


def is_narrow(dtype: str) -> bool:
    """Returns whether a dtype is floating and narrower than float32."""
    return 0 < bits(dtype) < 32


def is_wide(dtype: str) -> bool:
    """Returns whether a dtype is float32 or float64."""
    return bits(dtype) >= 32


def is_sixteen_bits(dtype: str) -> bool:
    """Returns whether a dtype is floating, and of more than 8 bits but less than 32."""
    return 8 < bits(dtype) < 32


def is_complex(dtype: str) -> bool:
    """Returns whether a dtype is complex."""
    return dtype.startswith("complex")


def is_cast(node: Node) -> bool:
    """Returns whether a node casts between real floating dtypes."""
    is_conversion = node.name == "convert_element_type"
    return is_conversion and bits(node.inputs[0].dtype) > 0 and bits(node.out.dtype) > 0


def widens(node: Node) -> bool:
    """Returns whether a node casts a value from half precision to float32 or float64."""
    return is_cast(node) and is_narrow(node.inputs[0].dtype) and is_wide(node.out.dtype)


def narrows(node: Node) -> bool:
    """Returns whether a node casts a value from float32 or float64 to half precision."""
    return is_cast(node) and is_wide(node.inputs[0].dtype) and is_narrow(node.out.dtype)


def is_matmul(node: Node) -> bool:
    """Returns whether a node is a matmul or a convolution."""
    return kind_of(node.name) in ("dot", "convolution") and not is_joint(node)


def is_layout(node: Node) -> bool:
    """Returns whether a node moves numbers without changing any."""
    return node.name in ops.MOVES_DATA


def is_view(node: Node) -> bool:
    """Returns whether a node moves or casts numbers."""
    return is_layout(node) or is_cast(node)


def is_selection(node: Node) -> bool:
    """Returns whether a node selects from all of its inputs but the first."""
    return node.name in ("select_n", "branch")


def operands(node: Node) -> list[Value]:
    """Returns the floating operands of a matmul."""
    return [value for value in node.inputs if bits(value.dtype)]


# --------------------------------------------------------------------------------------------------
# Towards the arguments
# --------------------------------------------------------------------------------------------------


def moved_from(node: Node, value: Value) -> Value:
    """Returns the operand that a data movement makes a result of."""
    is_one_for_each = len(node.outputs) == len(node.inputs)
    return node.inputs[node.outputs.index(value) if is_one_for_each else 0]


def views(value: Value, passes: Passes = is_layout) -> Iterator[Value]:
    """Yields a value, and those that it is a view of, through nodes that `passes` accepts."""
    yield value
    while value.maker is not None and value.maker.inputs and passes(value.maker):
        value = moved_from(value.maker, value)
        yield value


def made_of(value: Value, passes: Passes = is_layout) -> Value:
    """Returns the first value that this one is a view of."""
    *_, first = views(value, passes)
    return first


def behind(value: Value, operands: OperandsOf, most: float = math.inf) -> Iterator[Value]:
    """Yields a value, and those that it is computed from; `most` at most."""
    return followed([value], lambda one: () if one.maker is None else operands(one.maker), most)


def makers(value: Value, operands: OperandsOf, most: float = math.inf) -> Iterator[Node]:
    """Yields the nodes that make a value and those `behind` it."""
    return (one.maker for one in behind(value, operands, most) if one.maker is not None)


def in_order(value: Value, goes_on: Passes) -> Iterator[Node]:
    """Yields the nodes that a value is made by within one iteration of every loop, the first ones
    first. Nodes that `goes_on` refuses, and those that only they depend on, are left out.
    """
    seen, waiting = set[Node](), [(value.maker, False)]
    while waiting:
        node, is_next = waiting.pop()
        if node is not None and is_next:
            yield node
        elif node is not None and node not in seen and node.name != "carry" and goes_on(node):
            seen.add(node)
            waiting += [(node, True), *((one.maker, False) for one in node.inputs)]


# --------------------------------------------------------------------------------------------------
# Towards the results
# --------------------------------------------------------------------------------------------------


def reached(values: Iterable[Value], passes: Passes = is_layout) -> Iterator[Value]:
    """Yields values, and all values derived from them through nodes that `passes` accepts."""

    def results(value: Value) -> list[Value]:
        return [out for node in value.readers if passes(node) for out in node.outputs]

    return followed(values, results)


def users(value: Value, passes: Passes = is_layout) -> Iterator[Node]:
    """Yields the nodes that compute with a value, looking through nodes that `passes` accepts."""
    return (node for node in readers_past([value], passes) if not passes(node))


def followed(
    values: Iterable[Value], following: Callable[[Value], Iterable[Value]], most: float = math.inf
) -> Iterator[Value]:
    """Yields values, and those that `following` gives for each of them, once; `most` at most."""
    waiting = list(values)
    seen = set(waiting)
    while waiting and len(seen) < most:
        value = waiting.pop()
        yield value
        fresh = [one for one in following(value) if one not in seen]
        seen.update(fresh)
        waiting.extend(fresh)


# --------------------------------------------------------------------------------------------------
# Equality and ranges
# --------------------------------------------------------------------------------------------------


def is_constant(value: Value) -> bool:
    """Returns whether a value is a number that the program holds, cast or repeated."""
    return made_of(value, lambda node: node.name in ops.MOVES_DATA | ops.CASTS).array is not None


def are_equal(one: Value, other: Value, depth: int = 12) -> bool:
    """Returns whether the program shows that two values hold the same numbers.

    They do if they are rearrangements of one value, or results of the same operations on equal
    operands.

    Args:
      depth: the longest chain of operations that is compared.
    """
    one, other = (made_of(v, lambda node: node.name in ops.REARRANGES) for v in (one, other))
    if one is other:
        return True
    first, second = one.maker, other.maker
    if first is None or second is None or not depth or is_joint(first) or is_joint(second):
        return one.is_literal and other.is_literal and bool(one.array == other.array)
    if first.name != second.name or len(first.inputs) != len(second.inputs) or not first.inputs:
        return False
    if first.outputs.index(one) != second.outputs.index(other):
        return False
    if str(first.params) != str(second.params):
        return False
    return all(are_equal(a, b, depth - 1) for a, b in zip(first.inputs, second.inputs, strict=True))


class Interval(NamedTuple):
    """The numbers from `low` to `high`."""

    low: float = -math.inf
    high: float = math.inf


def interval_of(value: Value, depth: int = _DEEP) -> Interval:
    """Returns an interval that holds all numbers of a value, NaN aside.

    It follows from the limits that the program itself sets.
    """
    if value.array is not None:
        numbers = numbers_in(value.array)
        numbers = numbers[~np.isnan(numbers)]
        return Interval(float(numbers.min()), float(numbers.max())) if numbers.size else Interval()
    held = _of_dtype(value.dtype)
    maker = value.maker
    if maker is None or not depth or not maker.inputs:
        return held
    found = _made(maker, value, lambda one: interval_of(one, depth - 1))
    return Interval(max(held.low, found.low), min(held.high, found.high))


def numbers_in(array: object) -> np.ndarray:
    """Returns the numbers of a small real array, in float64; none of any other object."""
    if not isinstance(array, np.ndarray) or array.size > LARGEST or np.iscomplexobj(array):
        return np.empty(0)
    is_number = array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)
    return array.astype(np.float64).ravel() if is_number else np.empty(0)


def _of_dtype(dtype: str) -> Interval:
    """Returns the numbers that an array has by its dtype alone.

    Floats of 16 bits or more have any, as they may be infinite.
    """
    if dtype == "bool":
        return Interval(0, 1)
    if "int" not in dtype and not 0 < bits(dtype) <= 8:
        return Interval()
    info = jnp.iinfo(dtype) if "int" in dtype else jnp.finfo(dtype)
    return Interval(float(info.min), float(info.max))


def _made(node: Node, value: Value, of: Callable[[Value], Interval]) -> Interval:
    """Returns the interval of a node's result, given `of` for its inputs."""
    if node.name in _UNIT:
        return Interval(-1, 1)
    if is_selection(node) or node.name in ops.PLACES:
        each = list(map(of, node.inputs[is_selection(node) :]))
        return Interval(min(one.low for one in each), max(one.high for one in each))
    # The places of the largest are integers, and none of the numbers.
    is_ordered = node.name in _ORDERED and bool(bits(value.dtype))
    if node.name in _KEPT or is_ordered:
        return of(moved_from(node, value))
    if node.name not in ARITHMETIC:
        return Interval()
    return _computed(ARITHMETIC[node.name], list(map(of, node.inputs)))


def _computed(function: Callable[..., float], operands: list[Interval]) -> Interval:
    """Returns the range of a function that is monotone in each operand, below and above zero."""
    ends = [(*one, 0.0) if one.low < 0 < one.high else one for one in operands]
    with np.errstate(all="ignore"):
        found = [float(function(*each)) for each in itertools.product(*ends)]
    return Interval() if any(map(math.isnan, found)) else Interval(min(found), max(found))


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

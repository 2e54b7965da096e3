"""Scales that are computed from an array: its largest magnitude, or a norm of it."""

from __future__ import annotations

from collections.abc import Iterator

from policy.inspect.audit.flow import is_matmul
from policy.inspect.audit.ranges import moved_from
from policy.programs.costs import size
from policy.programs.graph import Node, Value, is_joint
from policy.programs.operations import kind_of
from policy.programs.primitives import (
    ADDITIONS,
    ANNOTATES,
    CASTS,
    EXTREMES,
    MINMAX,
    MOVES_DATA,
    ORDERS,
    PRODUCTS,
    ROUNDINGS,
    SIGN_CHANGES,
)

_FAR = 96  # values that are searched for the origin of one
# Between a quotient and the cast of it: limits, rounding, noise, and changes of sign.
_BETWEEN = MOVES_DATA | ANNOTATES | CASTS | MINMAX | ROUNDINGS | ADDITIONS | PRODUCTS
_BETWEEN |= SIGN_CHANGES | {"select_n"}


def is_scaled_by_itself(value: Value) -> bool:
    """Returns whether a value was divided by, or multiplied with, a scale computed from it.

    Limits, rounding, casts and constants may follow.
    """
    return any(_is_scaling(node) for node in _behind(value))


def is_rescaled(value: Value) -> bool:
    """Returns whether a value was divided or multiplied by another array at all."""
    return any(
        node.name in PRODUCTS and not any(map(is_constant, node.inputs)) for node in _behind(value)
    )


def _behind(value: Value) -> Iterator[Node]:
    """Yields the nodes that a value is made by, as far as they keep what was scaled."""
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _FAR:
        maker = waiting.pop().maker
        if maker is None or not (maker.name in _BETWEEN or is_joint(maker)):
            continue
        yield maker
        fresh = [one for one in maker.inputs if id(one) not in seen and not is_constant(one)]
        seen.update(map(id, fresh))
        waiting.extend(fresh)


def _is_scaling(node: Node) -> bool:
    if node.name not in PRODUCTS:
        return False
    array, scale = node.inputs
    if node.name == "mul" and _least(array) < _least(scale):
        array, scale = scale, array
    chain = set(map(id, _chain(array)))
    return any(id(one) in chain for found in _reductions(scale) for one in _chain(found.inputs[0]))


def _reductions(value: Value) -> Iterator[Node]:
    """Yields the reductions that a value depends on, the nearest ones."""
    waiting, seen = [value], {id(value)}
    while waiting and len(seen) < _FAR:
        maker = waiting.pop().maker
        if maker is None or maker.name == "carry" or is_matmul(maker):
            continue
        is_sum = kind_of(maker.name) == "reduction" and not is_joint(maker)
        if (is_sum or maker.name in EXTREMES | ORDERS) and maker.inputs:
            yield maker
            continue
        fresh = [one for one in maker.inputs if id(one) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)


def _chain(value: Value) -> Iterator[Value]:
    """Yields a value and those that it is a function of, one after another."""
    for _ in range(_FAR):
        yield value
        maker = value.maker
        if maker is None or maker.name == "carry" or is_matmul(maker) or not maker.inputs:
            return
        if maker.name in MOVES_DATA or maker.name in ANNOTATES:
            value = moved_from(maker, value)
            continue
        whole = {id(v): v for v in maker.inputs if not is_constant(v) and v.shape == value.shape}
        if len(whole) != 1:
            return
        (value,) = whole.values()


def _least(value: Value) -> int:
    """Returns how many numbers an array has, before they were repeated."""
    least = size(value.shape)
    while value.maker is not None and value.maker.name in MOVES_DATA and value.maker.inputs:
        value = moved_from(value.maker, value)
        least = min(least, size(value.shape))
    return least


def is_constant(value: Value) -> bool:
    """Returns whether a value is a number that the program holds, cast or repeated."""
    while value.array is None:
        maker = value.maker
        if maker is None or not maker.inputs:
            return False
        if maker.name not in MOVES_DATA and maker.name not in CASTS:
            return False
        value = moved_from(maker, value)
    return True

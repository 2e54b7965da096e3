"""Scales that are computed from an array: its largest magnitude, or a norm of it."""

from __future__ import annotations

from collections.abc import Iterator

from policy.inspect.audit.values import behind, is_matmul, made_of, moved_from, views
from policy.programs.operations import kind_of, size
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
from policy.programs.reading.graph import Node, Value, is_joint

_FAR = 96  # values that are searched for the origin of one
# Between a quotient and the cast of it: limits, rounding, noise, and changes of sign.
_BETWEEN = MOVES_DATA | ANNOTATES | CASTS | MINMAX | ROUNDINGS | ADDITIONS | PRODUCTS
_BETWEEN |= SIGN_CHANGES | {"select_n"}


def is_scaled_by_itself(value: Value) -> bool:
    """Returns whether a value was divided by, or multiplied with, a scale computed from it.

    Limits, rounding, casts and constants may follow.
    """
    return any(_is_scaling(node) for node in _behind(value))


def _behind(value: Value) -> Iterator[Node]:
    """Yields the nodes that a value is made by, as far as they keep what was scaled."""

    def keeps(node: Node) -> bool:
        return node.name in _BETWEEN or is_joint(node)

    def scaled(node: Node) -> list[Value]:
        return [one for one in node.inputs if not is_constant(one)] if keeps(node) else []

    makers = (one.maker for one in behind(value, scaled, _FAR))
    return (maker for maker in makers if maker is not None and keeps(maker))


def _is_scaling(node: Node) -> bool:
    if node.name not in PRODUCTS:
        return False
    array, scale = node.inputs
    if node.name == "mul" and least_size(array) < least_size(scale):
        array, scale = scale, array
    chain = set(map(id, _chain(array)))
    return any(id(one) in chain for found in _reductions(scale) for one in _chain(found.inputs[0]))


def _reductions(value: Value) -> Iterator[Node]:
    """Yields the reductions that a value depends on, the nearest ones."""

    def reduces(node: Node) -> bool:
        is_sum = kind_of(node.name) == "reduction" and not is_joint(node)
        return bool(node.inputs) and (is_sum or node.name in EXTREMES | ORDERS)

    def others(node: Node) -> list[Value]:
        return [] if node.name == "carry" or is_matmul(node) or reduces(node) else node.inputs

    makers = (one.maker for one in behind(value, others, _FAR))
    return (maker for maker in makers if maker is not None and reduces(maker))


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


def least_size(value: Value) -> int:
    """Returns how many numbers an array has, before they were repeated."""
    return min(size(one.shape) for one in views(value))


def is_constant(value: Value) -> bool:
    """Returns whether a value is a number that the program holds, cast or repeated."""
    return made_of(value, lambda node: node.name in MOVES_DATA | CASTS).array is not None

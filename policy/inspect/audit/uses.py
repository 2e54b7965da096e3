"""Uses of functions of half numbers: separates activations from results that must be exact."""

from __future__ import annotations

from collections.abc import Callable

from policy.inspect.audit.values import is_cotangent, is_matmul, made_of, reached
from policy.programs.operations import is_steep, sums
from policy.programs.primitives import (
    ADDITIONS,
    BOUNDED,
    LIMITS,
    MOVES_DATA,
    PASSES_ACTIVATIONS,
    POWERS,
    PRODUCTS,
    SCALINGS,
    SQUARE_ROOTS,
)
from policy.programs.reading.graph import Node, Value, is_joint

_MOVES = MOVES_DATA | PASSES_ACTIVATIONS
_NORMALISES = POWERS | SQUARE_ROOTS


def is_summed(value: Value) -> bool:
    """Returns whether a value is summed, possibly after it was cast, scaled or selected from."""
    passes = lambda node: not is_cotangent(node) and _passes(node, adds=False)  # noqa: E731
    readers = (node for each in reached([value], passes) for node in each.readers)
    return any(map(_sums, readers)) or _is_term(value)


def _is_term(value: Value) -> bool:
    """Returns whether a value is added to others, and nothing but a sum reads the result."""
    while len(readers := [node for node in value.readers if not is_cotangent(node)]) == 1:
        (reader,) = readers
        if is_joint(reader) or _sums(reader) or not _passes(reader, adds=True):
            return _sums(reader)
        value = reader.out
    return False


def joins_by_hand(node: Node, is_one: Callable[[Node], bool]) -> bool:
    """Returns whether a node adds two values, each a result of nodes that `is_one` accepts, or a
    sum or multiple of such results.
    """

    def is_made(value: Value) -> bool:
        maker = made_of(value).maker
        if maker is None or is_one(maker):
            return maker is not None
        arrays = [one for one in maker.inputs if not one.is_literal]
        if maker.name in ADDITIONS:
            return all(map(is_made, arrays))
        return maker.name in PRODUCTS and any(map(is_made, arrays))

    is_sum = node.name in ADDITIONS and not any(value.is_literal for value in node.inputs)
    return is_sum and all(map(is_made, node.inputs))


def matters(node: Node) -> bool:
    """Returns whether a result is more than an activation.

    It is if it is summed, alone or with others, divided by or returned, or if an exponential or
    logarithm of it is taken.
    Exponentials are followed through scaling and selection, logarithms through additions too.
    Softplus is an activation: a sum of it counts only if no matmul follows, as in a loss.
    """
    if node.name == "expm1" and _is_guarded(node.inputs[0]):
        return False
    if _is_softplus(node):
        return _is_judged(node)
    if _is_term(node.out):
        return True
    adds = node.name.startswith("log")
    passes = lambda reader: is_joint(reader) or _passes(reader, adds)  # noqa: E731
    return any(
        value.is_output or any(_is_sensitive(r, value) for r in value.readers if not _is_beside(r))
        for value in reached(node.outputs, lambda node: not _is_beside(node) and passes(node))
    )


def _is_sensitive(reader: Node, value: Value) -> bool:
    """Returns whether a node sums, divides by, or takes an exponential or logarithm of a value.

    The logarithm of a softplus does not count if that is an activation.
    """
    if _sums(reader) or (reader.name == "div" and reader.inputs[1] is value):
        return True
    if joins_by_hand(reader, _is_exponential):
        return True
    if _is_softplus(reader):
        return _is_judged(reader)
    return _is_steep(reader)


def _is_exponential(node: Node) -> bool:
    return node.name.startswith("exp") and node.name != "expm1"


def _is_steep(node: Node) -> bool:
    return is_steep(node.name) and not is_cotangent(node) and not _is_kept_only(node)


def _is_softplus(node: Node) -> bool:
    """Returns whether a node is the ``log1p`` of ``max(x, 0) + log1p(exp(-abs(x)))``."""
    if node.name != "log1p":
        return False
    return _operand(_operand(_operand(node, "exp"), "neg"), "abs") is not None


def _operand(node: Node | None, name: str) -> Node | None:
    """Returns the node that makes a node's operand, if it has that name."""
    maker = None if node is None else made_of(node.inputs[0]).maker
    return maker if maker is not None and maker.name == name else None


def _is_judged(node: Node) -> bool:
    """Returns whether a softplus is more than an activation.

    It is if it, or a sum of it, is returned or passed to an exponential or a logarithm. It also is
    if neither a matmul nor a bounded function follows in the forward pass: a loss that is only
    differentiated has no readers there.
    """

    def passes(reader: Node) -> bool:
        is_of_norm = reader.name in _NORMALISES or _sums(reader) or is_joint(reader)
        return not _is_beside(reader) and (is_of_norm or _passes(reader, adds=True))

    values = list(reached(node.outputs, passes))
    readers = [reader for value in values for reader in value.readers]
    if any(value.is_output for value in values) or any(map(_is_steep, readers)):
        return True
    return not any((is_matmul(r) or r.name in BOUNDED) and not is_cotangent(r) for r in readers)


def _is_beside(node: Node) -> bool:
    """Returns whether a node ends the search: a matmul, or a node of the backward pass."""
    return is_matmul(node) or is_cotangent(node)


def _is_kept_only(node: Node) -> bool:
    """Returns whether only the backward pass reads a result.

    This is the case for derivatives that the forward pass computes and saves.
    """
    passes = lambda reader: reader.name in _MOVES or is_joint(reader)  # noqa: E731
    values = list(reached(node.outputs, lambda reader: not is_cotangent(reader) and passes(reader)))
    readers = [reader for value in values for reader in value.readers]
    is_read_forward = any(not is_cotangent(reader) and not passes(reader) for reader in readers)
    return bool(readers) and not is_read_forward and not any(value.is_output for value in values)


def _sums(node: Node) -> bool:
    return not is_joint(node) and sums(node.site.equation)


def _passes(reader: Node, adds: bool) -> bool:
    """Returns whether a node only moves, scales, shifts or selects from a value.

    Args:
      adds: whether additions of arrays count too.
    """
    return reader.name in _MOVES or (
        reader.name in ADDITIONS and (adds or any(value.is_literal for value in reader.inputs))
    )


def _is_guarded(value: Value) -> bool:
    """Returns whether a `where` or `minimum` keeps a value from being large, as in elu."""
    maker = made_of(value, lambda node: node.name in MOVES_DATA | SCALINGS).maker
    return maker is not None and maker.name in LIMITS

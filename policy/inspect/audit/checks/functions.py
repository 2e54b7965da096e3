"""Functions of half-precision numbers whose error or range matters: exp, log, roots, squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy.inspect.audit.findings import FUNCTION, Finding, finding, sum_limit
from policy.inspect.audit.flow import (
    Flow,
    are_equal,
    is_cotangent,
    is_layout,
    is_matmul,
    is_narrow,
    made_of,
    makers,
    reached,
)
from policy.inspect.traced.equation_facts import sums
from policy.programs import primitives as ops
from policy.programs.reading.graph import Node, Value, is_joint, readers_past

_STEEPNESS = (
    "an argument near 10 is rounded by 0.03, which is 3% of its exponential",
    "exponentials overflow above 11, and logarithms are off by their argument's last digit",
)
_MOVES = ops.MOVES_DATA | ops.PASSES_ACTIVATIONS


def low_precision_functions(flow: Flow) -> Iterator[Finding]:
    """Yields functions of half-precision numbers that are not mere activations."""
    for node in flow.forward:
        if not node.inputs or all(value.is_literal for value in node.inputs):
            continue
        dtype = node.inputs[0].dtype
        if is_narrow(dtype) and (reason := _reason(node, dtype)):
            yield finding(FUNCTION, node, f"{node.name} of {dtype}: {reason}")


def _reason(node: Node, dtype: str) -> str:
    """Returns the reason why a function should not run in half precision, or ""."""
    name = node.name
    if name in ops.STEEP and _matters(node):
        steepness = _STEEPNESS[dtype == "float16"]
        return (
            f"{steepness}, and it is summed, divided by or returned. Cast the argument to float32."
        )
    if name in ops.PERIODIC:
        return (
            "the argument's last digit is a large part of a turn. Compute the angles, and this "
            "function of them, in float32."
        )
    if name == "rsqrt" or (name == "sqrt" and _is_statistic(node.inputs[0])):
        return (
            f"a variance or norm in {dtype} {sum_limit(dtype)}. Keep statistics in float32, and "
            "cast the normalized result back."
        )
    if name == "div" and _is_root_of_statistic(node.inputs[1]):
        return (
            f"it normalizes in {dtype}, by a rounded deviation or norm. Normalize in float32, and "
            "cast the result back."
        )
    if _is_norm_by_dot(node):
        return (
            "a dot sums squares in float16, and overflows above 65504. Give it "
            "preferred_element_type=jnp.float32."
        )
    if dtype == "float16" and _divides_by_dot(node):
        return (
            "it divides by a variance or norm whose squares a dot sums in float16, which overflows "
            "above 65504. Sum the squares in float32."
        )
    power = _power(node)
    is_summed = power > 1 and _is_summed(node.out)
    if is_summed or (power == 2 and _is_added_to_a_square(node)):
        is_narrow = dtype == "float16"
        limit = (
            f"overflow above {int(65504 ** (1 / power))}" if is_narrow else "lose all but 8 bits"
        )
        is_square = power == 2
        what, by = ("squares", "squaring") if is_square else (f"powers of {power}", "multiplying")
        return f"{what} in {dtype} {limit}, and these are summed. Cast to float32 before {by}."
    return ""


# --------------------------------------------------------------------------------------------------
# Squares and statistics
# --------------------------------------------------------------------------------------------------


def _squares(node: Node) -> bool:
    return _power(node) == 2


def _power(node: Node) -> int:
    """Returns the integer that a node raises its operand to, or 1."""
    if node.name == "integer_pow":
        return node.params["y"]
    is_square = node.name == "square" or (
        node.name == "mul" and are_equal(node.inputs[0], node.inputs[1])
    )
    return 2 if is_square else 1


def _is_added_to_a_square(node: Node) -> bool:
    """Returns whether a square, times any factor, is added to another one by hand."""
    multiples = reached([node.out], lambda reader: is_layout(reader) or reader.name in ops.PRODUCTS)
    return any(_joins_by_hand(reader, _squares) for one in multiples for reader in one.readers)


def _is_norm_by_dot(node: Node) -> bool:
    """Returns whether a node is the inner product of float16 rows with themselves."""
    if node.name != "dot_general" or node.out.dtype != "float16" or not _is_dot_of_squares(node):
        return False
    (contracted, _), (batch, _) = node.params["dimension_numbers"]
    return len(contracted) + len(batch) == len(node.inputs[0].shape)


def _divides_by_dot(node: Node) -> bool:
    """Returns whether a node takes a root, reciprocal or log of squares summed by a half dot."""
    of = node.inputs[node.name == "div"]
    if node.name == "div" and _is_root_of_statistic(of, _is_dot_of_squares):
        return True
    exponent = node.params.get("y")
    is_reciprocal = node.name == "integer_pow" and isinstance(exponent, int) and exponent < 0
    is_root = node.name in ops.ROOTS or node.name.startswith("log")
    is_sensitive = is_root or is_reciprocal or node.name == "div"
    return is_sensitive and _is_statistic(of, _is_dot_of_squares)


def _is_dot_of_squares(node: Node) -> bool:
    """Returns whether a node is a half-precision matmul of squares, or of equal operands."""
    operands = node.inputs[:2]
    if not is_matmul(node) or not all(is_narrow(value.dtype) for value in operands):
        return False
    origins = (made_of(value).maker for value in operands)
    are_squares = any(origin is not None and _squares(origin) for origin in origins)
    return are_squares or are_equal(operands[0], operands[1])


def _is_reduction(node: Node) -> bool:
    return node.kind == "reduction"


def _is_statistic(value: Value, of: Callable[[Node], bool] = _is_reduction) -> bool:
    """Returns whether a value is a sum by a node that `of` accepts; cast, shifted or scaled."""
    return any(of(maker) for maker in makers(value, _rescaled))


def _is_root_of_statistic(value: Value, of: Callable[[Node], bool] = _is_reduction) -> bool:
    """Returns whether a value is a square root of such a sum; cast, shifted or scaled."""
    roots = (maker for maker in makers(value, _rescaled) if maker.name == "sqrt")
    return any(_is_statistic(root.inputs[0], of) for root in roots)


def _rescaled(node: Node) -> list[Value]:
    return node.inputs if is_layout(node) or node.name in ops.RESCALES else []


# --------------------------------------------------------------------------------------------------
# Uses: activations, and results that must be exact
# --------------------------------------------------------------------------------------------------


def _is_summed(value: Value) -> bool:
    """Returns whether a value is summed, possibly after it was cast, scaled or selected from."""
    passes = lambda node: not is_cotangent(node) and _passes(node, adds=False)  # noqa: E731
    return any(map(_sums, readers_past([value], passes))) or _is_term(value)


def _is_term(value: Value) -> bool:
    """Returns whether a value is added to others, and nothing but a sum reads the result."""
    while len(readers := [node for node in value.readers if not is_cotangent(node)]) == 1:
        (reader,) = readers
        if is_joint(reader) or _sums(reader) or not _passes(reader, adds=True):
            return _sums(reader)
        value = reader.out
    return False


def _joins_by_hand(node: Node, is_one: Callable[[Node], bool]) -> bool:
    """Returns whether a node adds two values, each a result of nodes that `is_one` accepts, or a
    sum or multiple of such results.
    """

    def is_made(value: Value) -> bool:
        maker = made_of(value).maker
        if maker is None or is_one(maker):
            return maker is not None
        arrays = [one for one in maker.inputs if not one.is_literal]
        if maker.name in ops.ADDITIONS:
            return all(map(is_made, arrays))
        return maker.name in ops.PRODUCTS and any(map(is_made, arrays))

    is_sum = node.name in ops.ADDITIONS and not any(value.is_literal for value in node.inputs)
    return is_sum and all(map(is_made, node.inputs))


def _matters(node: Node) -> bool:
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

    def passes(reader: Node) -> bool:
        return not _is_beside(reader) and (is_joint(reader) or _passes(reader, adds))

    return any(
        value.is_output or any(_is_sensitive(r, value) for r in value.readers if not _is_beside(r))
        for value in reached(node.outputs, passes)
    )


def _is_sensitive(reader: Node, value: Value) -> bool:
    """Returns whether a node sums, divides by, or takes an exponential or logarithm of a value.

    The logarithm of a softplus does not count if that is an activation.
    """
    if _sums(reader) or (reader.name == "div" and reader.inputs[1] is value):
        return True
    if _joins_by_hand(reader, lambda node: node.name.removesuffix("2") == "exp"):
        return True
    return _is_judged(reader) if _is_softplus(reader) else _is_steep(reader)


def _is_steep(node: Node) -> bool:
    """Returns whether a node is an exponential or such, and not only for the backward pass.

    Derivatives that the forward pass computes and saves are read by the backward pass alone.
    """
    if node.name not in ops.STEEP or is_cotangent(node):
        return False
    moves = lambda reader: reader.name in _MOVES or is_joint(reader)  # noqa: E731
    passes = lambda reader: not is_cotangent(reader) and moves(reader)  # noqa: E731
    readers = list(readers_past(node.outputs, passes))
    is_returned = any(value.is_output for value in reached(node.outputs, passes))
    return is_returned or not readers or not all(is_cotangent(r) or moves(r) for r in readers)


def _is_softplus(node: Node) -> bool:
    """Returns whether a node is the ``log1p`` of ``max(x, 0) + log1p(exp(-abs(x)))``."""

    def operand(node: Node | None, name: str) -> Node | None:
        maker = None if node is None else made_of(node.inputs[0]).maker
        return maker if maker is not None and maker.name == name else None

    return node.name == "log1p" and operand(operand(operand(node, "exp"), "neg"), "abs") is not None


def _is_judged(node: Node) -> bool:
    """Returns whether a softplus is more than an activation.

    It is if it, or a sum of it, is returned or passed to an exponential or a logarithm. It also is
    if neither a matmul nor a bounded function follows in the forward pass: a loss that is only
    differentiated has no readers there.
    """

    def passes(reader: Node) -> bool:
        is_of_norm = (
            reader.name in ops.POWERS | ops.SQUARE_ROOTS or _sums(reader) or is_joint(reader)
        )
        return not _is_beside(reader) and (is_of_norm or _passes(reader, adds=True))

    readers = list(readers_past(node.outputs, passes))
    is_returned = any(value.is_output for value in reached(node.outputs, passes))
    if is_returned or any(map(_is_steep, readers)):
        return True
    return not any((is_matmul(r) or r.name in ops.BOUNDED) and not is_cotangent(r) for r in readers)


def _is_beside(node: Node) -> bool:
    """Returns whether a node ends the search: a matmul, or a node of the backward pass."""
    return is_matmul(node) or is_cotangent(node)


def _sums(node: Node) -> bool:
    return not is_joint(node) and sums(node.site.equation)


def _passes(reader: Node, adds: bool) -> bool:
    """Returns whether a node only moves, scales, shifts or selects from a value.

    Args:
      adds: whether additions of arrays count too.
    """
    return reader.name in _MOVES or (
        reader.name in ops.ADDITIONS and (adds or any(value.is_literal for value in reader.inputs))
    )


def _is_guarded(value: Value) -> bool:
    """Returns whether a `where` or `minimum` keeps a value from being large, as in elu."""
    maker = made_of(value, lambda node: node.name in ops.MOVES_DATA | ops.SCALINGS).maker
    return maker is not None and maker.name in ops.LIMITS

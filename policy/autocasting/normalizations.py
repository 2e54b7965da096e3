"""Finds the normalizations of a program by their arithmetic, not by names of modules or scopes.

A normalization divides x, or x minus its mean, by a root of the second moment of x over some axes,
or of a stored variance, and may scale and shift the quotient by parameters:

    (x - mean(x)) * rsqrt(var(x) + epsilon) * scale + bias

The second moment is a mean of squares, in one pass or two, with a mask or over devices, at any
depth of nested programs. A sum of squares in place of the mean, or a mean over all axes, counts
only if a parameter scales or shifts the quotient: without one it is a norm, or standardizes a batch
of data. Quotients of the program's arguments that are neither scaled nor read by a matmul are
standardized data too, such as the targets of a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from policy.programs import primitives
from policy.programs.reading.graph import Graph, Node, Value, is_cotangent

MOMENT_ROOTS = primitives.SQUARE_ROOTS | {"pow"}
COPIES = primitives.FORWARDS | {"row", "rows", "shard", "shards", "branch"}
"""Copy elements of an operand, some of them or several times."""
# Primitives allowed between the sum of a second moment and its root.
_OF_MOMENTS = COPIES | primitives.OF_MOMENTS
# Operations that are followed back to find whether a value repeats numbers along an axis.
_DEEPEST = 8


class Found(NamedTuple):
    """The nodes of normalizations: of statistics, and those whose results are as large as x."""

    measures: set[Node]
    applies: set[Node]


def normalizations(graph: Graph, is_param: Sequence[bool]) -> Found:
    """Returns the normalizations of a program.

    Args:
      graph: the program.
      is_param: whether each of its arguments is a parameter. Values computed from parameters alone
        are never normalized.
    """
    found = Found(set(), set())
    _note_facts(graph, is_param)
    for node in graph.nodes:
        if node.name in MOMENT_ROOTS:
            _look_at(node, found)
    return found


def _note_facts(graph: Graph, is_param: Sequence[bool]) -> None:
    """Notes of each value whether it `yields`, and whether it is `given`.

    A value that yields is made of parameters and literals alone. One that is given is made of
    arguments and constants by elementwise operations and changes of shape alone. The carry of a
    loop stands for that of every turn, not of the first, and is neither.
    """
    for argument, yields in zip(graph.arguments, is_param, strict=True):
        argument.yields, argument.given = yields, True
    for node in graph.nodes:
        inputs = node.inputs[node.name == "branch" :]
        for value in inputs:
            if value.maker is None and not value.given:
                value.yields, value.given = value.number is not None, True
        if node.name == "carry":
            continue
        floats = [value for value in inputs if value.is_float] or inputs
        # A row of a table is an activation, as it is for the evaluator.
        yields = node.name != "gather" and bool(floats) and all(value.yields for value in floats)
        is_moved = node.name in COPIES or node.name in primitives.ELEMENTWISE
        given = is_moved and all(value.given for value in inputs)
        for output in node.outputs:
            output.yields, output.given = yields, given


def _look_at(root: Node, found: Found) -> None:
    """Adds the normalizations that divide by a root, if any."""
    is_inverse = _is_inverse(root)
    if is_inverse is None:
        return
    moments, statistics = _statistics_of(root.inputs[0])
    moments = [moment for moment in moments if not moment.of.yields]
    has_sums = any(operation.name == "reduce_sum" for operation in statistics)
    is_running = not has_sums and root.inputs[0].given and root.inputs[0].number is None
    if not moments and not (is_running and root.inputs[0].shape):
        return
    quotients, of_root = _quotients(root, is_inverse)
    for quotient in quotients:
        numerator = _chain_of(quotient.numerator)
        chosen = next((m for m in moments if _meeting(numerator, _chain_of(m.of))), None)
        affine = _affine(quotient.operation.out, quotient.is_scaled, False, of_root)
        if chosen is None and not (is_running and _is_centered(numerator, affine, of_root)):
            continue
        is_norm = chosen is not None and not chosen.is_mean
        is_data = numerator.data[-1].given and not _feeds_a_matmul(quotient.operation.out)
        if (is_norm or is_data) and not (affine or quotient.is_scaled):
            continue
        found.measures.update((root, *of_root, *statistics))
        found.applies.update((quotient.operation, *affine, *_centring(numerator, moments)))
        for moment in moments:
            found.measures.update(moment.operations)
            squared = _chain_of(moment.of)
            met = squared.data.index(_meeting(squared, numerator) or moment.of)
            found.measures.update(squared.operations[:met])
    found.measures.difference_update(found.applies)


def _is_inverse(root: Node) -> bool | None:
    """Returns True for an inverse square root and False for a square root.

    Returns None for other operations.
    """
    if root.name != "pow":
        return root.name == "rsqrt"
    exponent = root.inputs[1]
    while exponent.number is None and exponent.maker is not None and exponent.maker.name in COPIES:
        exponent = _operand_copied(exponent.maker)
    number = None if exponent.number is None else float(exponent.number)
    return {0.5: False, -0.5: True}.get(number) if number is not None else None


def _is_centered(numerator: _DefinitionChain, affine: Sequence[Node], of_root: set[Node]) -> bool:
    """Returns whether a stored mean is subtracted.

    It is subtracted before the division, or afterwards, divided by the root itself.
    """
    if numerator.data[0].yields:
        return False
    before = (op for op in numerator.operations if op.name == "sub")
    return any(_is_stored(op.inputs[1], op.out.shape) for op in before) or any(
        op.name in primitives.FORWARD_ADDITIONS and any(data.maker in of_root for data in op.inputs)
        for op in affine
    )


def _centring(numerator: _DefinitionChain, moments: Iterable[_Moment]) -> list[Node]:
    """Returns the operations of a numerator up to the last subtraction of a mean."""
    squares = {data for moment in moments for data in _chain_of(moment.of).data}
    last = next((i for i, data in enumerate(numerator.data) if data in squares), 0)
    for i, operation in enumerate(numerator.operations):
        if operation.name == "sub" and _is_mean(operation, squares):
            last = max(last, i + 1)
    return numerator.operations[:last]


def _is_mean(subtraction: Node, of: set[Value]) -> bool:
    """Returns whether the subtrahend is a stored mean, or computed from sums of the minuend."""
    mean, shape = subtraction.inputs[1], subtraction.out.shape
    if mean.given and mean.number is None and _repeats(mean, shape):
        return True
    sums = [one for one in _statistics_of(mean)[1] if one.name == "reduce_sum"]
    return any(not of.isdisjoint(_chain_of(operation.inputs[0]).data) for operation in sums)


# --------------------------------------------------------------------------------------------------
# The quotient, its scale and its bias
# --------------------------------------------------------------------------------------------------


class _Quotient(NamedTuple):
    operation: Node
    numerator: Value
    is_scaled: bool


def _quotients(root: Node, is_inverse: bool) -> tuple[list[_Quotient], set[Node]]:
    """Returns the quotients by a root, and the operations on the root before.

    Quotients are divisions by the root, or products with its reciprocal. Before them are
    broadcasts, the addition of an epsilon, and scaling.
    """
    found: list[_Quotient] = []
    before: set[Node] = set()
    left = [(root.out, is_inverse, False)]
    while left:
        data, is_inverse, is_scaled = left.pop()
        for operation in data.readers:
            if operation in before or is_cotangent(operation):
                continue
            quotient, after = _read(operation, data, is_inverse, is_scaled)
            if quotient is not None:
                found.append(quotient)
            elif after is not None:
                before.add(operation)
                left += [(output, *after) for output in operation.outputs]
    return found, before


def _read(
    operation: Node, data: Value, is_inverse: bool, is_scaled: bool
) -> tuple[_Quotient | None, tuple[bool, bool] | None]:
    """Reads an operation on a root: a quotient, or a step before one.

    Returns:
      The quotient, or None; and (is_inverse, is_scaled) of the result of a step before the
      quotient, or None.
    """
    name, others = operation.name, [other for other in operation.inputs if other is not data]
    if name in COPIES:
        return None, (is_inverse, is_scaled)
    if name == "reciprocal" or (name == "integer_pow" and operation.params["y"] == -1):
        return None, (not is_inverse, is_scaled)
    if name in primitives.JOINS_ROOTS:
        floats = [other for other in others if other.is_float]
        stored = all(_is_stored(other, operation.out.shape) for other in floats)
        return None, (is_inverse, is_scaled) if stored else None
    if name not in primitives.PRODUCTS or len(others) != 1:
        return None, None
    shape = operation.out.shape
    other, divides = others[0], name == "div" and operation.inputs[1] is data
    is_whole = data.shape == shape and not _repeats(data, shape)
    if _is_stored(other, shape) or (other.given and is_whole):
        return None, (is_inverse != divides, is_scaled or other.number is None)
    if is_inverse if name == "mul" else divides and not is_inverse:
        return _Quotient(operation, other, is_scaled), None
    return None, None


def _affine(data: Value, is_scaled: bool, is_shifted: bool, of_root: set[Node]) -> list[Node]:
    """Returns the operations that scale a quotient by stored values and then shift it.

    Operations between them are included.
    """
    found: list[Node] = []
    readers = [one for one in data.readers if one.name != "carry" and not is_cotangent(one)]
    for operation in readers:
        others = [other for other in operation.inputs if other is not data]
        is_number = len(others) == 1 and others[0].number is not None
        after: tuple[bool, bool] | None = None
        is_scaling = operation.name in primitives.PRODUCTS and is_number and len(readers) == 1
        if operation.name in COPIES or is_scaling:
            rest = _affine(operation.out, is_scaled, is_shifted, of_root)
            found += [operation, *rest] if rest else []
        elif len(others) == 1 and not is_number and _affects(operation, data, others[0], of_root):
            if operation.name in primitives.PRODUCTS and not (is_scaled or is_shifted):
                after = (True, False)
            elif operation.name in primitives.FORWARD_ADDITIONS and not is_shifted:
                after = (True, True)
        if after is not None:
            found += [operation, *_affine(operation.out, *after, of_root)]
    return found


def _feeds_a_matmul(data: Value) -> bool:
    return any(
        reader.name in primitives.MATMULS
        or (reader.name in COPIES and any(map(_feeds_a_matmul, reader.outputs)))
        for reader in data.readers
    )


def _affects(operation: Node, data: Value, other: Value, of_root: set[Node]) -> bool:
    """Returns whether an operation scales or shifts `data` by a stored value.

    A value computed from the root and stored values counts too.
    """
    if operation.name == "div" and operation.inputs[0] is not data:
        return False
    return _is_stored(other, operation.out.shape) or other.maker in of_root


# --------------------------------------------------------------------------------------------------
# Second moments, and chains of values that move, shift and scale the same numbers
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Moment:
    """A sum of squares.

    Attributes:
      of: the squared value.
      is_mean: whether it is divided by a count, and not taken over all axes.
      operations: the operations between `of` and the sum.
    """

    of: Value
    is_mean: bool
    operations: list[Node]


def _statistics_of(data: Value) -> tuple[list[_Moment], list[Node]]:
    """Returns the sums of squares that a value is computed from, and the operations since."""
    moments: list[_Moment] = []
    operations: dict[Node, None] = {}
    left = [(data, False)]
    while left:
        data, is_mean = left.pop()
        operation = data.maker
        if operation is None or operation in operations or operation.name not in _OF_MOMENTS:
            continue
        operations[operation] = None
        if operation.name == "reduce_sum":
            moments += _moment(operation, is_mean)
            continue
        for i, operand in enumerate(operation.inputs):
            if operand.is_float:
                left.append((operand, is_mean or _divides(operation, i)))
    return moments, list(operations)


def _divides(operation: Node, i: int) -> bool:
    """Returns whether an operation divides its operand `i` or multiplies it by a number.

    A mean does either to its sum.
    """
    if operation.name == "div":
        return i == 0
    others = [*operation.inputs[:i], *operation.inputs[i + 1 :]]
    return operation.name == "mul" and any(data.number is not None for data in others)


def _moment(sum_: Node, is_mean: bool) -> Iterator[_Moment]:
    data, operations = sum_.inputs[0], []
    while (operation := data.maker) is not None:
        operations.append(operation)
        squared = _squared(operation)
        if squared is not None:
            yield _Moment(squared, is_mean and sum_.out.shape != (), operations)
            return
        following = operation.inputs[0] if operation.name == "reduce_sum" else _through(operation)
        if following is None:
            return
        data, is_mean = following, is_mean or operation.name == "div"


def _squared(operation: Node) -> Value | None:
    """Returns the value that an operation squares, or None."""
    name, inputs = operation.name, operation.inputs
    squares = (
        name == "square"
        or (name == "integer_pow" and operation.params["y"] == 2)
        or (name == "mul" and _unconverted(inputs[0]) is _unconverted(inputs[1]))
        or (name == "pow" and inputs[1].number == 2)
    )
    return inputs[0] if squares else None


def _unconverted(data: Value) -> Value:
    while data.maker is not None and data.maker.name == "convert_element_type":
        data = data.maker.inputs[0]
    return data


@dataclasses.dataclass
class _DefinitionChain:
    """A value and its predecessors.

    Attributes:
      data: the values, latest first.
      operations: the operation that computes each value from the next one in `data`.
    """

    data: list[Value]
    operations: list[Node]


def _chain_of(data: Value) -> _DefinitionChain:
    chain = _DefinitionChain([data], [])
    while (operation := data.maker) is not None:
        following = _through(operation)
        if following is None:
            break
        data = following
        chain.data.append(data)
        chain.operations.append(operation)
    return chain


def _through(operation: Node) -> Value | None:
    """Returns the operand whose numbers an operation moves, scales, shifts or masks.

    Returns None for all other operations.
    """
    name, inputs = operation.name, operation.inputs
    if name in COPIES and inputs:
        return _operand_copied(operation)
    if name in primitives.SIGN_CHANGES:
        return inputs[0]
    if name == "select_n":
        cases = [data for data in inputs[1:] if not data.yields]
        return cases[0] if len(cases) == 1 else None
    shape = operation.out.shape
    if name in primitives.FORWARD_ADDITIONS:
        kept = [data for data in inputs if not (data.yields or _repeats(data, shape))]
    elif name == "mul":
        kept = [data for data in inputs if not _is_stored(data, shape)]
    else:
        return inputs[0] if name == "div" and _is_stored(inputs[1], shape) else None
    return kept[0] if len(kept) == 1 else None


def _operand_copied(operation: Node) -> Value:
    """Returns the operand that an operation of `COPIES` copies: of a conditional, a branch's."""
    return operation.inputs[operation.name == "branch"]


def _is_stored(data: Value, shape: tuple[Any, ...]) -> bool:
    """Returns whether a value is a parameter, a number, or an argument broadcast to `shape`."""
    return data.yields or (data.given and _repeats(data, shape))


def _repeats(data: Value, shape: tuple[Any, ...], depth: int = _DEEPEST) -> bool:
    """Returns whether a value that is read in `shape` repeats numbers."""
    if data.shape != shape:
        return True
    operation = data.maker
    if operation is None or not depth:
        return False
    if operation.name in primitives.BROADCASTS and operation.inputs[0].shape != shape:
        return True
    if operation.name in COPIES:
        return _repeats(_operand_copied(operation), _operand_copied(operation).shape, depth - 1)
    if operation.name not in primitives.ELEMENTWISE:
        return False
    floats = [operand for operand in operation.inputs if operand.is_float]
    return bool(floats) and all(_repeats(operand, shape, depth - 1) for operand in floats)


def _meeting(chain: _DefinitionChain, other: _DefinitionChain) -> Value | None:
    """Returns the first value of a chain that is also in the other, or None.

    Values made of parameters alone are skipped.
    """
    of_other = set(other.data)
    return next((data for data in chain.data if data in of_other and not data.yields), None)

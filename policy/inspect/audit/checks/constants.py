"""Constants that their dtype cannot hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.finding_kinds import CONSTANT, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.lost_constants import Lost
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.ranges import ARITHMETIC, numbers_in
from policy.inspect.audit.values import (
    bits,
    is_cotangent,
    is_narrow,
    is_selection,
    made_of,
    users,
)
from policy.programs.primitives import COMPARISONS, INFINITE_AT_ZERO, MINMAX, MOVES_DATA
from policy.programs.reading.graph import Node, Value

Numbers = frozenset[float]  # values of an array's elements, or their nonzero extremes

_MOST_NUMBERS = 8
_JUST_BEYOND = 1.07  # 8-bit casts may round a number within this factor to the largest one


def constants_out_of_range(flow: Flow) -> Iterator[Finding]:
    """Yields constants that overflow or vanish where they are cast.

    Constants are followed through arithmetic with other constants, `where` and broadcasts. A
    constant that JAX cast during tracing is already infinite or zero: it is a finding where NumPy
    reported the cast, or where it must be a mistake, as a factor or beside a divisor.
    """
    known: dict[int, Numbers] = {}
    for node in flow.graph.nodes:
        if _is_to_floating(node):
            yield from _cast(node, known)
        elif node.outputs and not is_cotangent(node):
            yield from _traced_away(node, flow.lost)
        _propagate(node, known)


def _is_to_floating(node: Node) -> bool:
    """Returns whether a node casts integers or floating numbers to a floating dtype."""
    return node.name == "convert_element_type" and bits(node.out.dtype) > 0


def _cast(node: Node, known: dict[int, Numbers]) -> Iterator[Finding]:
    dtype = node.out.dtype
    for number in sorted(_numbers(node.inputs[0], known)):
        result = _as(number, dtype)
        if np.isfinite(number) and not np.isfinite(result) and bits(dtype) > 8:
            becomes = (
                f"{result:g}: it overflows. Use jnp.finfo({dtype}).min, or -inf if no row is "
                "masked completely"
            )
        elif _is_beyond(number, dtype) or (np.isinf(number) and np.isnan(result)):
            becomes = (
                f"{result:g}: the largest finite number is {_largest(dtype):.4g}. Divide by a "
                "scale before the cast, and keep the scale"
            )
        elif number != 0 and result == 0:
            becomes = f"0: it vanishes. The smallest number is {_smallest(dtype)}"
        else:
            continue
        yield finding(
            CONSTANT, node, f"{number:g} in {dtype} is {becomes}.", (node.inputs[0].dtype, dtype)
        )


def _as(number: float, dtype: str) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.asarray(number, np.float64).astype(jnp.dtype(dtype)))


def _traced_away(node: Node, lost: Lost) -> Iterator[Finding]:
    """Yields numbers of a half dtype that became infinite, NaN or zero during tracing.

    An array counts if NumPy reported its line, a literal also if nobody would write it there.
    """
    line = node.site.source.partition(" ")[0]
    for value in node.inputs:
        numbers, dtype = numbers_in(value.array), value.dtype
        if not numbers.size or not is_narrow(dtype):
            continue
        if (
            np.isinf(numbers).any()
            and (line in lost.overflowed or (value.is_literal and node.name == "mul"))
        ) or _is_beyond_8_bits(node, value):
            number = numbers[np.abs(numbers).argmax()]
            message = (
                f"A constant overflowed: it is {number:g} in {dtype}, whose largest finite number "
                f"is {_largest(dtype):.4g}."
            )
            message += " 0 * inf and inf - inf are NaN." if np.isinf(number) else ""
            yield finding(CONSTANT, node, message, (dtype,))
        elif (numbers == 0).any() and (
            line in lost.vanished
            or (value.is_literal and (_is_shift_of_divisor(node) or _is_8_bit_factor(node, value)))
        ):
            message = (
                f"A constant vanished: it is 0 in {dtype}, whose smallest number is "
                f"{_smallest(dtype)}."
            )
            yield finding(CONSTANT, node, message, (dtype,))


def _is_beyond_8_bits(node: Node, value: Value) -> bool:
    """Returns whether an 8-bit literal has overflowed, which NumPy does not report.

    Overflow makes NaN in dtypes without infinity, and infinity in the others. -inf is exempt: masks
    are written with it.
    """
    if not value.is_literal or bits(value.dtype) > 8 or node.name in COMPARISONS:
        return False
    number = float(value.array)
    return bool(np.isnan(number)) or (number == np.inf and node.name not in MINMAX)


def _is_8_bit_factor(node: Node, value: Value) -> bool:
    return bits(value.dtype) <= 8 and node.name == "mul"


def _is_shift_of_divisor(node: Node) -> bool:
    """Returns whether a node adds to a divisor, as an epsilon is added."""
    return node.name == "add" and any(_divides_by(user, node.out) for user in users(node.out))


def _is_beyond(number: float, dtype: str) -> bool:
    return bool(np.isfinite(number)) and abs(number) > _JUST_BEYOND * _largest(dtype)


def _largest(dtype: str) -> float:
    return float(jnp.finfo(dtype).max)


def _smallest(dtype: str) -> str:
    return f"{float(jnp.finfo(dtype).smallest_subnormal):.1e}"


def _divides_by(node: Node, value: Value) -> bool:
    if node.name == "div":
        return made_of(node.inputs[1]) is value
    return node.name in INFINITE_AT_ZERO


def _numbers(value: Value, known: dict[int, Numbers]) -> Numbers:
    """Returns numbers that a value holds in some places, as far as they are known."""
    if value.array is None:
        return known.get(id(value), frozenset())
    numbers = numbers_in(value.array)
    if value.shape:
        numbers = numbers[numbers != 0]
    return frozenset(map(float, (numbers.min(), numbers.max()) if numbers.size else ()))


def _propagate(node: Node, known: dict[int, Numbers]) -> None:
    if len(node.outputs) != 1:
        return
    operands = [_numbers(value, known) for value in node.inputs]
    found: Numbers = frozenset()
    if node.name in MOVES_DATA:
        found = found.union(*operands)
    elif is_selection(node):
        found = found.union(*operands[1:])
    elif node.name == "convert_element_type":
        found = frozenset((0.0, 1.0)) if node.inputs[0].dtype == "bool" else operands[0]
    elif node.name in ARITHMETIC:  # of no numbers, if those of an operand are unknown
        with np.errstate(all="ignore"):
            each = itertools.product(*operands)
            found = frozenset(float(ARITHMETIC[node.name](*numbers)) for numbers in each)
    if len(found) <= _MOST_NUMBERS:
        known[id(node.out)] = found

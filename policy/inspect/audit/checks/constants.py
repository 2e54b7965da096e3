"""Constants that their dtype cannot hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.findings import CONSTANT, Finding, finding
from policy.inspect.audit.flow import Flow, Lost
from policy.inspect.audit.values import (
    ARITHMETIC,
    bits,
    is_cotangent,
    is_narrow,
    is_selection,
    made_of,
    numbers_in,
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
    known: dict[Value, Numbers] = {}
    for node in flow.graph.nodes:
        operands = [_numbers(value, known) for value in node.inputs]
        if node.name == "convert_element_type" and bits(node.out.dtype):
            yield from _cast(node, operands[0])
        elif node.outputs and not is_cotangent(node):
            yield from _traced_away(node, flow.lost)
        if len(node.outputs) == 1 and len(found := _computed(node, operands)) <= _MOST_NUMBERS:
            known[node.out] = found


def _numbers(value: Value, known: dict[Value, Numbers]) -> Numbers:
    """Returns numbers that a value holds in some places, as far as they are known."""
    if value.array is None:
        return known.get(value, frozenset())
    numbers = numbers_in(value.array)
    if value.shape:
        numbers = numbers[numbers != 0]
    return frozenset(map(float, (numbers.min(), numbers.max()) if numbers.size else ()))


def _computed(node: Node, operands: list[Numbers]) -> Numbers:
    """Returns numbers that the result of a node holds in some places."""
    none: Numbers = frozenset()
    if node.name in MOVES_DATA:
        return none.union(*operands)
    if is_selection(node):
        return none.union(*operands[1:])
    if node.name == "convert_element_type":
        return frozenset((0.0, 1.0)) if node.inputs[0].dtype == "bool" else operands[0]
    if node.name not in ARITHMETIC:
        return none
    with np.errstate(all="ignore"):  # none, if those of an operand are unknown
        each = itertools.product(*operands)
        return frozenset(float(ARITHMETIC[node.name](*numbers)) for numbers in each)


def _cast(node: Node, numbers: Numbers) -> Iterator[Finding]:
    dtype = node.out.dtype
    largest = float(jnp.finfo(dtype).max)
    for number in sorted(numbers):
        with np.errstate(over="ignore", under="ignore"):
            result = float(np.asarray(number, np.float64).astype(jnp.dtype(dtype)))
        is_beyond = np.isfinite(number) and abs(number) > _JUST_BEYOND * largest
        if np.isfinite(number) and not np.isfinite(result) and bits(dtype) > 8:
            becomes = (
                f"{result:g}: it overflows. Use jnp.finfo({dtype}).min, or -inf if no row is "
                "masked completely"
            )
        elif is_beyond or (np.isinf(number) and np.isnan(result)):
            becomes = (
                f"{result:g}: the largest finite number is {largest:.4g}. Divide by a scale before "
                "the cast, and keep the scale"
            )
        elif number != 0 and result == 0:
            becomes = f"0: it vanishes. The smallest number is {_smallest(dtype)}"
        else:
            continue
        message = f"{number:g} in {dtype} is {becomes}."
        yield finding(CONSTANT, node, message, (node.inputs[0].dtype, dtype))


def _traced_away(node: Node, lost: Lost) -> Iterator[Finding]:
    """Yields numbers of a half dtype that became infinite, NaN or zero during tracing.

    An array counts if NumPy reported its line, a literal also if nobody would write it there.
    """
    line = node.site.source.partition(" ")[0]
    for value in node.inputs:
        numbers, dtype = numbers_in(value.array), value.dtype
        if not numbers.size or not is_narrow(dtype):
            continue
        is_factor = value.is_literal and node.name == "mul"
        is_infinite = np.isinf(numbers).any() and (line in lost.overflowed or is_factor)
        if is_infinite or _is_beyond_8_bits(node, value):
            number = numbers[np.abs(numbers).argmax()]
            message = (
                f"A constant overflowed: it is {number:g} in {dtype}, whose largest finite number "
                f"is {float(jnp.finfo(dtype).max):.4g}."
            )
            message += " 0 * inf and inf - inf are NaN." if np.isinf(number) else ""
            yield finding(CONSTANT, node, message, (dtype,))
        elif (numbers == 0).any() and (
            line in lost.vanished
            or (is_factor and bits(dtype) <= 8)
            or (value.is_literal and _is_shift_of_divisor(node))
        ):
            message = (
                f"A constant vanished: it is 0 in {dtype}, whose smallest number is "
                f"{_smallest(dtype)}."
            )
            yield finding(CONSTANT, node, message, (dtype,))


def _smallest(dtype: str) -> str:
    return f"{float(jnp.finfo(dtype).smallest_subnormal):.1e}"


def _is_beyond_8_bits(node: Node, value: Value) -> bool:
    """Returns whether an 8-bit literal has overflowed, which NumPy does not report.

    Overflow makes NaN in dtypes without infinity, and infinity in the others. -inf is exempt: masks
    are written with it.
    """
    if not value.is_literal or bits(value.dtype) > 8 or node.name in COMPARISONS:
        return False
    number = float(value.array)
    return bool(np.isnan(number)) or (number == np.inf and node.name not in MINMAX)


def _is_shift_of_divisor(node: Node) -> bool:
    """Returns whether a node adds to a divisor, as an epsilon is added."""

    def divides(user: Node) -> bool:
        is_divisor = user.name == "div" and made_of(user.inputs[1]) is node.out
        return is_divisor or user.name in INFINITE_AT_ZERO

    return node.name == "add" and any(map(divides, users(node.out)))

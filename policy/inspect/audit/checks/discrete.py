"""Constants, integers and choices that a dtype of few bits changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.findings import CHOICE, CONSTANT, INTEGER, Finding, finding
from policy.inspect.audit.flow import (
    ARITHMETIC,
    Flow,
    Lost,
    bits,
    interval_of,
    is_constant,
    is_cotangent,
    is_matmul,
    is_narrow,
    is_selection,
    is_sixteen_bits,
    made_of,
    makers,
    narrows,
    numbers_in,
    widens,
)
from policy.inspect.traced.authors import source_of_site
from policy.inspect.traced.equation_facts import size
from policy.programs import primitives as ops
from policy.programs.paths import spelled
from policy.programs.reading.graph import Node, Value, is_joint, readers_past

# --------------------------------------------------------------------------------------------------
# Constants
# --------------------------------------------------------------------------------------------------

Numbers = frozenset[float]  # values of an array's elements, or their nonzero extremes

_MOST_NUMBERS = 8
_JUST_BEYOND = 1.07  # 8-bit casts may round a number within this factor to the largest one


def constants_out_of_range(flow: Flow) -> Iterator[Finding]:
    """Yields constants that overflow or vanish where they are cast.

    Constants are followed through arithmetic with other constants, `where` and broadcasts. A
    constant that JAX cast during tracing is already infinite or zero: it is a finding where NumPy
    reported the cast, or where it must be a mistake, as a factor.
    """
    known: dict[Value, Numbers] = {}
    for node in flow.graph.nodes:
        operands = [_held(value, known) for value in node.inputs]
        if node.name == "convert_element_type" and bits(node.out.dtype):
            yield from _cast(node, operands[0])
        elif node.outputs and not is_cotangent(node):
            yield from _traced_away(node, flow.lost)
        if len(node.outputs) == 1 and len(found := _computed(node, operands)) <= _MOST_NUMBERS:
            known[node.out] = found


def _held(value: Value, known: dict[Value, Numbers]) -> Numbers:
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
    if node.name in ops.MOVES_DATA:
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

    An array counts if NumPy reported its line, a literal also if nobody would write it as a factor.
    """
    line = source_of_site(node.site).partition(" ")[0]
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
        elif (numbers == 0).any() and (line in lost.vanished or (is_factor and bits(dtype) <= 8)):
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
    if not value.is_literal or bits(value.dtype) > 8 or node.name in ops.COMPARISONS:
        return False
    number = float(value.array)
    return bool(np.isnan(number)) or (number == np.inf and node.name not in ops.MINMAX)


_KEEPS = ops.MOVES_DATA | ops.SIGN_CHANGES | ops.EXTREMES | ops.ROUNDINGS | {"row", "rows"}
_SHIFTS = (
    ops.MOVES_DATA | ops.ADDITIONS | ops.PRODUCTS | ops.MINMAX | ops.SIGN_CHANGES | {"select_n"}
)
_SCORES = _SHIFTS | ops.ELEMENTWISE | ops.CASTS | ops.REDUCTIONS
_MOST_SCORES = 128  # values between a choice and the matmul of its logits


# --------------------------------------------------------------------------------------------------
# Integers
# --------------------------------------------------------------------------------------------------


def rounded_integers(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision arrays of more integers, in even steps, than the dtype tells apart.

    Integers count that the program itself makes, scaled or shifted: positions, distances, counts
    and indices. Those of an argument are not known, but their sums and remainders are.
    """
    known: dict[Value, float] = {}
    for node in flow.graph.nodes:
        known.update(_known_steps(node, [_steps(value, known) for value in node.inputs]))
        if len(node.outputs) != 1 or is_joint(node) or is_cotangent(node):
            continue
        is_cast = node.name == "convert_element_type" and not is_narrow(node.inputs[0].dtype)
        if not is_sixteen_bits(node.out.dtype) or not (is_cast or node.name == "iota"):
            continue
        many = known.get(node.out, 0)
        limit = 2 ** (jnp.finfo(node.out.dtype).nmant + 1)
        if many > limit:
            message = (
                f"{many + 1:.0f} integers, or multiples of one number, in {node.out.dtype}, which "
                f"rounds those above {limit}. Compute with them in float32, and cast the result."
            )
            yield finding(INTEGER, node, message)


def _steps(value: Value, known: Mapping[Value, float]) -> float | None:
    """Returns the even steps from the smallest number of a value to the largest.

    They are 0 if the value depends on no argument and no draw, and has no known steps; None if
    nothing is known.
    """
    if value.array is None or not value.shape:
        return 0 if value.array is not None else known.get(value)
    numbers = np.unique(numbers_in(value.array))
    is_whole = np.isfinite(numbers).all() and (numbers == np.round(numbers)).all()
    return max(numbers.size - 1, 0) if is_whole else 0


def _known_steps(node: Node, each: list[float | None]) -> Iterator[tuple[Value, float]]:
    """Yields the results of a node with their steps, from those of its inputs."""
    is_fixed = None not in each and node.name not in ops.DRAWS
    is_moved = node.name == "sort" or node.name in ops.MOVES_DATA
    if len(node.outputs) == len(each) > 1 and is_moved:
        many = [steps or 0 for steps in each]
    elif node.name == "top_k":
        many = [0, _size(node, (node.params["axis"],)) - 1]
    elif len(node.outputs) == 1:
        is_known = None not in each or "int" in node.out.dtype
        many = [_steps_of_result(node, [steps or 0 for steps in each], is_known)]
    else:
        many = [0] * len(node.outputs)
    for value, steps in zip(node.outputs, many, strict=True):
        if steps or is_fixed:
            yield value, steps


def _steps_of_result(node: Node, each: list[float], is_known: bool) -> float:
    """Returns the steps of a node's only result, 0 if they are unknown.

    Args:
      node: the node.
      each: the steps of its inputs, 0 where they are unknown.
      is_known: whether the result is an array of integers if an input is one.
    """
    match node.name:
        case "iota":
            long = node.params["shape"][node.params["dimension"]]
            return long - 1 if isinstance(long, int) else 0
        case "argmax" | "argmin":
            return _size(node, node.params["axes"]) - 1
        case "convert_element_type":
            return 1 if node.inputs[0].dtype == "bool" else each[0]
        case "reduce_sum" | "cumsum":
            axes = node.params.get("axes", (node.params.get("axis"),))
            is_counted = "int" in node.out.dtype or is_constant(node.inputs[0])
            return (each[0] or is_counted) * _size(node, axes)
        case "scatter-add" if "int" in node.out.dtype:
            return each[0] + size(node.inputs[2].shape)
        case "add" | "sub":
            return sum(each) if is_known else 0
        case "mul":
            return math.prod(steps or 1 for steps in each) if is_known and any(each) else 0
        case "div":
            low, high = interval_of(node.inputs[1])
            is_whole = "int" in node.out.dtype and low == high > 0
            return (each[0] // low if is_whole else each[0]) if is_known else 0
        case "slice":
            return min(each[0], size(node.out.shape) - 1)
        case "carry" if len(each) == 2:
            return _counted(node) or max(each)
        case "min" | "rem" | "clamp":
            return _limited(node, each[node.name == "clamp"])
    if is_selection(node):
        return max(each[1:])
    if node.name in ops.MINMAX or node.name == "concatenate" or (is_joint(node) and each):
        return max(each)
    return each[0] if each and node.name in _KEEPS else 0


def _limited(node: Node, steps: float) -> float:
    """Returns the steps of a remainder, or of numbers that are limited from above."""
    high = interval_of(node.inputs[-1 if node.name == "clamp" else 1]).high
    if steps:
        return min(steps, abs(high))
    low, high = (0, high - 1) if node.name == "rem" else interval_of(node.out)
    is_limited = "int" in node.out.dtype and high - low < jnp.iinfo(node.out.dtype).max
    return max(high - low, 0) if is_limited else 0


def _counted(node: Node) -> float:
    """Returns the steps of a counter of the iterations of a loop; 0 for another carry."""
    after, length = node.inputs[1].maker, node.params.get("length")
    if after is None or after.name != "add" or not isinstance(length, int):
        return 0
    one, other = after.inputs
    return length if one is node.out and other.is_literal else 0


def _size(node: Node, axes: tuple[int, ...]) -> int:
    return size([node.inputs[0].shape[axis] for axis in axes])


# --------------------------------------------------------------------------------------------------
# Choices
# --------------------------------------------------------------------------------------------------


def rounded_choices(flow: Flow) -> Iterator[Finding]:
    """Yields choices of the largest among numbers that were rounded to half precision before, and
    those of routers among numbers that were computed from rounded ones in float32.
    """
    for node in flow.operations:
        is_order = node.name == "sort" and len(node.outputs) < 2  # of numbers: chooses nothing
        if node.name not in ops.CHOOSES or is_order or not node.outputs:
            continue
        cast, dtype = _rounding(node.inputs[0]), node.inputs[0].dtype
        if cast is not None:
            message = (
                f"{node.name} of numbers that were rounded to {dtype}: the largest ones may be "
                "equal there, and the first of them is taken. Choose in the dtype before the cast."
            )
            yield finding(CHOICE, node, message, (cast.inputs[0].dtype, dtype))
        elif (made := _rounded_logits(node.inputs[0])) is not None and _routes(node):
            dtype = made.out.dtype if narrows(made) else made.inputs[0].dtype
            where = spelled(made.path)
            message = (
                f"{node.name} chooses the rows of matmuls, as a router does, by numbers that were "
                f"rounded to {dtype}{f' in {where}' if where else ''}: those that are almost equal "
                "change places. Compute them in float32: with a rule float32 for the module "
                "(f32_inside rounds its output), or full_precision() around the line."
            )
            yield finding(CHOICE, node, message, (dtype, node.inputs[0].dtype))


def _rounding(value: Value, is_alone: bool = True, depth: int = 8) -> Node | None:
    """Returns the cast to half precision that numbers went through, or None.

    Arithmetic in half precision may follow: a temperature, a mask, noise. Stored numbers that are
    added to others do not count, such as a bias.
    """
    maker = value.maker
    if maker is None or not is_narrow(value.dtype) or not depth:
        return None
    if narrows(maker):
        before = made_of(maker.inputs[0]).maker
        if before is None:
            return maker if is_alone else None
        # `jnp.sum` widens half numbers itself.
        is_sum = before.name in ops.REDUCTIONS
        widened = made_of(before.inputs[0]).maker if is_sum else before
        return None if widened is not None and widens(widened) else maker
    if maker.name not in _SHIFTS:
        return None
    arrays = [one for one in maker.inputs if not is_constant(one)]
    is_alone = is_alone and sum(is_narrow(one.dtype) for one in arrays) == 1
    casts = (_rounding(one, is_alone, depth - 1) for one in arrays)
    return next((cast for cast in casts if cast is not None), None)


def _rounded_logits(value: Value) -> Node | None:
    """Returns the matmul in half precision, or the cast to it, that numbers were computed from by
    such functions as a softmax, or None.
    """

    def operands(node: Node) -> list[Value]:
        goes_on = node.name in _SCORES or is_joint(node)
        return node.inputs if goes_on and not narrows(node) else []

    def rounds(node: Node) -> bool:
        multiplied = node.inputs[0].dtype if is_matmul(node) else ""
        return narrows(node) or is_narrow(multiplied) or multiplied == "int8"

    return next(filter(rounds, makers(value, operands, _MOST_SCORES)), None)


def _routes(node: Node) -> bool:
    """Returns whether matmuls of the same pass multiply what a choice's integers select."""

    def passes(reader: Node) -> bool:
        return reader.name != "carry" and not is_matmul(reader) and not is_cotangent(reader)

    chosen = [value for value in node.outputs if not bits(value.dtype)]
    return any(map(is_matmul, readers_past(chosen, passes)))

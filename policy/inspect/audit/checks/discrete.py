"""Choices and draws that half precision changes: the largest numbers, and rare events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from policy.inspect.audit.finding_kinds import CHOICE, DRAW, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.ranges import interval_of, numbers_in
from policy.inspect.audit.scales import is_constant
from policy.inspect.audit.values import (
    behind,
    bits,
    is_narrow,
    made_of,
    narrows,
    widens,
)
from policy.programs.primitives import (
    ADDITIONS,
    CASTS,
    CHOOSES,
    COMPARISONS,
    DRAWS,
    MINMAX,
    MOVES_DATA,
    PRODUCTS,
    REDUCTIONS,
    SIGN_CHANGES,
)
from policy.programs.reading.graph import Node, Value, is_joint

_SHIFTS = MOVES_DATA | ADDITIONS | PRODUCTS | MINMAX | SIGN_CHANGES | {"select_n"}
_SCALES_A_DRAW = MOVES_DATA | ADDITIONS | PRODUCTS | MINMAX | CASTS
_MOST_STEPS = 32  # from a comparison back to the bits of a draw
_WORST = 0.1  # the relative error of a probability


# --------------------------------------------------------------------------------------------------
# Choices
# --------------------------------------------------------------------------------------------------


def rounded_choices(flow: Flow) -> Iterator[Finding]:
    """Yields choices of the largest among numbers that were rounded to half precision before."""
    for node in flow.graph.nodes:
        if node.name not in CHOOSES or is_joint(node) or len(node.outputs) < _results(node):
            continue
        cast = _rounding(node.inputs[0])
        if cast is None:
            continue
        dtype = node.inputs[0].dtype
        message = (
            f"{node.name} of numbers that were rounded to {dtype}: the largest ones may be equal "
            "there, and the first of them is taken. Choose in the dtype before the cast."
        )
        yield finding(CHOICE, node, message, (cast.inputs[0].dtype, dtype))


def _results(node: Node) -> int:
    """Returns how many results a choice has: a sort of the numbers alone chooses nothing."""
    return 2 if node.name == "sort" else 1


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
        is_computed = before is not None and not _is_of_half(before)
        return maker if is_computed or (before is None and is_alone) else None
    if maker.name not in _SHIFTS:
        return None
    arrays = [one for one in maker.inputs if not is_constant(one)]
    is_alone = is_alone and sum(is_narrow(one.dtype) for one in arrays) == 1
    casts = (_rounding(one, is_alone, depth - 1) for one in arrays)
    return next((cast for cast in casts if cast is not None), None)


def _is_of_half(node: Node) -> bool:
    """Returns whether a node widens half numbers, or sums them as `jnp.sum` does."""
    before = made_of(node.inputs[0]).maker if node.name in REDUCTIONS else node
    return before is not None and widens(before)


# --------------------------------------------------------------------------------------------------
# Draws
# --------------------------------------------------------------------------------------------------


def coarse_draws(flow: Flow) -> Iterator[Finding]:
    """Yields comparisons of uniform numbers in half precision with a probability that they miss."""
    for node in flow.graph.nodes:
        for draw, numbers in _compared(node):
            dtype = _drawn_in(draw) if numbers else ""
            if not is_narrow(dtype):
                continue
            steps = 2 ** jnp.finfo(dtype).nmant
            chances = ((each, math.ceil(each * steps) / steps) for each in numbers)
            for wanted, found in chances:
                if 0 < wanted < 1 and abs(found - wanted) > _WORST * min(wanted, 1 - wanted):
                    message = (
                        f"A uniform draw in {dtype} has {steps} values: it is below {wanted:.3g} "
                        f"with a probability of {found:.3g}. Draw in float32."
                    )
                    yield finding(DRAW, node, message)
                    break


def _compared(node: Node) -> Iterator[tuple[Value, Sequence[float]]]:
    """Yields values that a node compares with known numbers, and these.

    A floor of a draw and a probability compares the draw with one less the probability.
    """
    if node.name in COMPARISONS:
        for value, other in (node.inputs, reversed(node.inputs)):
            yield value, _numbers(other)
    shifted = node.inputs[0].maker if node.name == "floor" else None
    if shifted is not None and shifted.name == "add":
        for value, other in (shifted.inputs, reversed(shifted.inputs)):
            yield value, [1 - number % 1 for number in _numbers(other)]


def _numbers(value: Value) -> Sequence[float]:
    """Returns the numbers of a stored array, or the one that the program computes without any."""
    array = made_of(value).array
    low, high = interval_of(value)
    return list(map(float, numbers_in(array))) if array is not None else [low] * (low == high)


def _drawn_in(value: Value) -> str:
    """Returns the dtype of random bits as a floating number, scaled and shifted; "" of others."""

    def operands(node: Node) -> list[Value]:
        return node.inputs if node.name in _SCALES_A_DRAW else []

    makers = (one.maker for one in behind(value, operands, _MOST_STEPS))
    for maker in makers:
        if maker is not None and maker.name == "bitcast_convert_type" and bits(maker.out.dtype):
            is_drawn = any(map(_is_random, behind(maker.inputs[0], most=_MOST_STEPS)))
            return maker.out.dtype if is_drawn else ""
    return ""


def _is_random(value: Value) -> bool:
    return value.maker is not None and value.maker.name in DRAWS

"""Integers, choices and draws that half precision changes: positions, indices, probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from policy.inspect.audit.finding_kinds import CHOICE, DRAW, INTEGER, finding
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import (
    behind,
    bits,
    is_narrow,
    is_selection,
    made_of,
    narrows,
    widens,
)
from policy.programs.operations import is_inexact_name
from policy.programs.primitives import (
    ADDITIONS,
    CHOOSES,
    COMPARISONS,
    DRAWS,
    EXTREMES,
    MINMAX,
    MOVES_DATA,
    PRODUCTS,
    SIGN_CHANGES,
)
from policy.programs.reading.graph import Node, Value, is_joint

_KEEPS = MOVES_DATA | SIGN_CHANGES | EXTREMES | {"row", "rows"}
_SCALES_A_DRAW = MOVES_DATA | ADDITIONS | PRODUCTS | MINMAX
_MOST_STEPS = 32  # from a comparison back to the bits of a draw
_WORST = 0.1  # the relative error of a probability


# --------------------------------------------------------------------------------------------------
# Integers
# --------------------------------------------------------------------------------------------------


def rounded_integers(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision arrays of more integers, in even steps, than the dtype tells apart.

    Integers count that the program itself makes, scaled or shifted: positions, distances, counts
    and indices. Those of an argument are not known.
    """
    steps: dict[int, float] = {}
    for node in flow.graph.nodes:
        _propagate(node, steps)
        if len(node.outputs) != 1 or not 8 < bits(node.out.dtype) < 32 or is_joint(node):
            continue
        is_cast = node.name == "convert_element_type" and not is_narrow(node.inputs[0].dtype)
        if node.name != "iota" and not is_cast:
            continue
        found, limit = steps.get(id(node.out), 0), 2 ** (jnp.finfo(node.out.dtype).nmant + 1)
        if found > limit:
            message = (
                f"{found + 1:.0f} integers, or multiples of one number, in {node.out.dtype}, which "
                f"rounds those above {limit}. Compute with them in float32, and cast the result."
            )
            yield finding(INTEGER, node, message)


def _steps(value: Value, steps: dict[int, float]) -> float:
    """Returns the steps from the smallest to the largest of an array of integers.

    It is 0 where that is unknown, and for a single number.
    """
    if value.array is None:
        return steps.get(id(value), 0)
    if not value.shape or not (value.dtype == "bool" or "int" in value.dtype or bits(value.dtype)):
        return 0
    numbers = np.unique(np.asarray(value.array, np.float64))
    is_whole = np.isfinite(numbers).all() and (numbers == np.round(numbers)).all()
    return max(numbers.size - 1, 0) if is_whole else 0


def _propagate(node: Node, steps: dict[int, float]) -> None:
    """Enters the steps of a node's results, where they are integers."""
    each = [_steps(value, steps) for value in node.inputs]
    if len(node.outputs) == len(each) > 1 and (node.name == "sort" or node.name in MOVES_DATA):
        steps.update((id(out), one) for out, one in zip(node.outputs, each, strict=True))
    elif node.name == "top_k":
        steps[id(node.outputs[1])] = _size(node, (node.params["axis"],)) - 1
    elif len(node.outputs) == 1:
        steps[id(node.out)] = _steps_of(node, each)


def _steps_of(node: Node, each: list[float]) -> float:
    """Returns the steps of a node's only result, from those of its inputs."""
    match node.name:
        case "iota":
            size = node.params["shape"][node.params["dimension"]]
            return size - 1 if isinstance(size, int) else 0
        case "argmax" | "argmin":
            return _size(node, node.params["axes"]) - 1
        case "convert_element_type":
            return 1 if node.inputs[0].dtype == "bool" else each[0]
        case "reduce_sum":
            return (each[0] or _is_fixed(node.inputs[0])) * _size(node, node.params["axes"])
        case "cumsum":
            return (each[0] or _is_fixed(node.inputs[0])) * _size(node, (node.params["axis"],))
        case "concatenate":
            return max(each)
        case "mul" if all(each):
            return math.prod(each)
        case "mul" | "div" | "add" | "sub":
            # With an unknown array of floats the result is no array of integers.
            is_known = [bool(one) or _is_fixed(v) for one, v in zip(each, node.inputs, strict=True)]
            return max(each) if all(is_known) or not bits(node.out.dtype) else 0
        case "min" | "rem":
            return min(each[0], _magnitude(node.inputs[1], each[1]))
        case "clamp":
            return min(each[1], _magnitude(node.inputs[2], each[2]))
    if is_selection(node):
        return max(each[1:])
    if node.name in MINMAX or (is_joint(node) and each):
        return max(each)
    return each[0] if each and node.name in _KEEPS else 0


def _is_fixed(value: Value) -> bool:
    return made_of(value).array is not None


def _magnitude(value: Value, steps: float) -> float:
    number = made_of(value)
    return abs(float(np.max(number.array))) if number.array is not None else steps


def _size(node: Node, axes: tuple[int, ...]) -> int:
    sizes = [node.inputs[0].shape[axis] for axis in axes]
    return math.prod(size if isinstance(size, int) else 1 for size in sizes)


# --------------------------------------------------------------------------------------------------
# Choices
# --------------------------------------------------------------------------------------------------


def rounded_choices(flow: Flow) -> Iterator[Finding]:
    """Yields choices of the largest among numbers that were rounded to half precision before."""
    for node in flow.graph.nodes:
        if node.name not in CHOOSES or is_joint(node) or len(node.outputs) < _results(node):
            continue
        cast = made_of(node.inputs[0]).maker
        if cast is None or not narrows(cast) or not is_narrow(node.inputs[0].dtype):
            continue
        before = made_of(cast.inputs[0]).maker
        if before is not None and widens(before):
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


# --------------------------------------------------------------------------------------------------
# Draws
# --------------------------------------------------------------------------------------------------


def coarse_draws(flow: Flow) -> Iterator[Finding]:
    """Yields comparisons of uniform numbers in half precision with a probability that they miss."""
    for node in flow.graph.nodes:
        if node.name not in COMPARISONS or not is_narrow(node.inputs[0].dtype):
            continue
        for draw, threshold in (node.inputs, reversed(node.inputs)):
            number = made_of(threshold)
            if number.array is None or np.size(number.array) != 1 or not _is_draw(draw):
                continue
            wanted = float(np.asarray(number.array, np.float64).reshape(()))
            steps = 2 ** jnp.finfo(draw.dtype).nmant
            found = math.ceil(wanted * steps) / steps
            if 0 < wanted < 1 and abs(found - wanted) > _WORST * min(wanted, 1 - wanted):
                message = (
                    f"A uniform draw in {draw.dtype} has {steps} values: it is below {wanted:.3g} "
                    f"with a probability of {found:.3g}. Draw in float32."
                )
                yield finding(DRAW, node, message)


def _is_draw(value: Value) -> bool:
    """Returns whether a value is random bits as a floating number, scaled and shifted."""

    def operands(node: Node) -> list[Value]:
        return node.inputs if node.name in _SCALES_A_DRAW else []

    makers = (one.maker for one in behind(value, operands, _MOST_STEPS))
    return any(
        maker is not None
        and maker.name == "bitcast_convert_type"
        and is_inexact_name(maker.out.dtype)
        and any(_is_random(each) for each in behind(maker.inputs[0], most=_MOST_STEPS))
        for maker in makers
    )


def _is_random(value: Value) -> bool:
    return value.maker is not None and value.maker.name in DRAWS

"""Trip counts of the loops of a compiled program, read from its text."""

from __future__ import annotations

import math
import re

from policy.inspect.hlo.text import Computation, Instruction, through_moves


def turns(loop: Instruction) -> int | None:
    """Returns the trip count of a `while`; None where it depends on data.

    It is the compiler's own count where the text has one; else it follows from the counter's start,
    bound and step.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"?(\d+)'):
        return int(known)
    start = through_moves(loop.operands[0])
    compare = _made_inside(loop.called["condition"][0].root)
    if compare.opcode != "compare":
        return None
    counter, bound = _index(compare.operands[0]), _value(compare.operands[1], start)
    if counter is None or bound is None:
        return None
    first, step = _entering(start, counter), _step(loop.called["body"][0], counter, start)
    if first is None or not step:
        return None
    direction = compare.attribute(r"direction=(\w+)")
    if direction in ("LT", "GT"):
        return max(0, math.ceil((bound - first) / step))
    if direction in ("LE", "GE"):
        return max(0, math.floor((bound - first) / step) + 1)
    return (bound - first) // step if direction == "NE" and (bound - first) % step == 0 else None


def _made_inside(instruction: Instruction) -> Instruction:
    """Returns the instruction that makes a value, of a fusion the one inside of it."""
    instruction = through_moves(instruction)
    return instruction.fused.root if instruction.opcode == "fusion" else instruction


def _number(instruction: Instruction) -> int | None:
    constant = through_moves(instruction)
    is_integer = constant.opcode == "constant" and re.fullmatch(r"-?\d+", constant.literal)
    return int(constant.literal) if is_integer else None


def _index(instruction: Instruction) -> int | None:
    """Returns the index of a value in the loop's state; None where it is not in it."""
    element = through_moves(instruction)
    is_state = element.opcode == "get-tuple-element" and element.operands[0].opcode == "parameter"
    return element.index if is_state else None


def _entering(start: Instruction, index: int) -> int | None:
    """Returns a number of the state that the loop starts with."""
    return _number(start.operands[index]) if start.opcode == "tuple" else None


def _value(instruction: Instruction, start: Instruction) -> int | None:
    """Returns a constant, or a number of the state that the loop starts with."""
    index = _index(instruction)
    return _number(instruction) if index is None else _entering(start, index)


def _step(body: Computation, counter: int, start: Instruction) -> int | None:
    """Returns the step of the loop's counter a turn; None where it can't be read."""
    if body.root.opcode != "tuple":
        return None
    add = _made_inside(body.root.operands[counter])
    if add.opcode not in ("add", "subtract"):
        return None
    total, moves = 0, False
    for position, side in enumerate(add.operands):
        if _index(side) == counter:
            moves = True
        elif (value := _value(side, start)) is None:
            return None
        else:
            total += -value if add.opcode == "subtract" and position else value
    return total if moves else None

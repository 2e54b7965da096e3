"""Trip counts of the loops of a compiled program, read from its text."""

from __future__ import annotations

import math
import re

from policy.inspect.hlo.text import Computation, Instruction, through_moves


def turns(
    computations: dict[str, Computation], inside: Computation, loop: Instruction
) -> int | None:
    """Returns the trip count of a `while`; None where it depends on data.

    It is the compiler's own count where the text has one; else it follows from the counter's start,
    bound and step.
    """
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.rest)
    if known:
        return int(known[1])
    condition = computations[loop.called["condition"][0]]
    body = computations[loop.called["body"][0]]
    compare = condition.root
    while compare.opcode in ("copy", "bitcast", "convert"):
        compare = condition.instructions[compare.operands[0]]
    if compare.opcode == "fusion":
        fused = computations[compare.called["calls"][0]]
        if fused.root.opcode != "compare":
            return None
        outer = [condition.instructions[name] for name in compare.operands]
        sides = [_through(fused, fused.instructions[name], outer) for name in fused.root.operands]
        compare = fused.root
    elif compare.opcode == "compare":
        sides = [condition.instructions[name] for name in compare.operands]
    else:
        return None
    start = inside.instructions[loop.operands[0]]
    counter = _index(condition, sides[0])
    bound = _number(condition, sides[1])
    if bound is None and (index := _index(condition, sides[1])) is not None:
        bound = _entering(inside, start, index)
    if counter is None or bound is None:
        return None
    first, step = (
        _entering(inside, start, counter),
        _step(computations, body, counter, inside, start),
    )
    direction = re.search(r"direction=(\w+)", compare.rest)
    if first is None or not step or direction is None:
        return None
    if direction[1] in ("LT", "GT"):
        return max(0, math.ceil((bound - first) / step))
    if direction[1] in ("LE", "GE"):
        return max(0, math.floor((bound - first) / step) + 1)
    return (bound - first) // step if direction[1] == "NE" and (bound - first) % step == 0 else None


def _through(fused: Computation, instruction: Instruction, outer: list[Instruction]) -> Instruction:
    """Resolves a fusion's parameter to the operand that it stands for, through copies and casts;
    else returns it.
    """
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = fused.instructions[instruction.operands[0]]
    return outer[int(instruction.literal)] if instruction.opcode == "parameter" else instruction


def _number(computation: Computation, instruction: Instruction) -> int | None:
    instruction = through_moves(computation, instruction)
    is_integer = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal)
    return int(instruction.literal) if is_integer else None


def _index(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the index of an instruction in the loop's state; None where it is not in it."""
    instruction = through_moves(computation, instruction)
    if instruction.opcode != "get-tuple-element":
        return None
    found = re.search(r"index=(\d+)", instruction.rest)
    is_state = computation.instructions[instruction.operands[0]].opcode == "parameter"
    return int(found[1]) if found and is_state else None


def _entering(inside: Computation, start: Instruction, index: int) -> int | None:
    start = through_moves(inside, start)
    if start.opcode != "tuple":
        return None
    return _number(inside, inside.instructions[start.operands[index]])


def _step(
    computations: dict[str, Computation],
    body: Computation,
    counter: int,
    inside: Computation,
    start: Instruction,
) -> int | None:
    """Returns the step of the loop's counter a turn; None where it can't be read."""
    result = body.root
    if result.opcode != "tuple":
        return None
    add = through_moves(body, body.instructions[result.operands[counter]])
    names, holder, outer = add.operands, body, None
    if add.opcode == "fusion":
        outer = [body.instructions[name] for name in add.operands]
        holder = computations[add.called["calls"][0]]
        add, names = holder.root, holder.root.operands
    if add.opcode not in ("add", "subtract"):
        return None
    total, moves = 0, False
    for position, name in enumerate(names):
        side = holder.instructions[name]
        where = holder
        if outer is not None:
            inner = through_moves(holder, side)
            side, where = (
                (outer[int(inner.literal)], body)
                if inner.opcode == "parameter"
                else (inner, holder)
            )
        if _index(where, side) == counter:
            moves = True
            continue
        value = _number(where, side)
        if value is None and (index := _index(where, side)) is not None:
            value = _entering(inside, start, index)
        if value is None:
            return None
        total += -value if add.opcode == "subtract" and position else value
    return total if moves else None

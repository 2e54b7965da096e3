"""Counts the bytes that an instruction of a compiled program moves to and from memory, by the
shapes in its text.
"""

from __future__ import annotations

from collections.abc import Sequence

from policy.inspect.hlo.text import Computation, HloArray, Instruction

_SLICES = ("dynamic-slice", "slice", "gather")
_LIBRARIES = ("__cublas", "__cudnn")
_Arrays = Sequence[HloArray]


def moved(instruction: Instruction) -> float:
    """Returns the bytes that a kernel reads and writes; on-chip memory is free.

    For an operand that is only sliced the slices count, for one that is updated in place the
    update.
    """
    operands, results = instruction.operands, produced(instruction)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _SLICES:
        sliced = min(_outside(operands[0].results), _whole(results))
        return _outside(results) + sliced + _outside(arrays_of(operands[1:]))
    if opcode == "dynamic-update-slice":
        update = operands[1].results
        return _outside(update) + min(_outside(results), _whole(update))
    if opcode == "fusion":
        fused = instruction.fused
        read = (_read(fused, number, operand.results) for number, operand in enumerate(operands))
        return sum(read) + _written(fused.root, results)
    if opcode == "custom-call" and instruction.target.startswith(_LIBRARIES):
        workspaces = ("s8", "u8")
        results = [array for array in results if array.dtype not in workspaces] or results
    return _outside(arrays_of(operands)) + _outside(results)


def produced(instruction: Instruction) -> _Arrays:
    """Returns the results of an instruction; for the start of an asynchronous one, the results of
    its end.

    The start's own results are its operands, the results and contexts; those of a copy begin with
    the copy.
    """
    opcode, results = instruction.opcode, instruction.results
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return results
    if opcode == "copy-start":
        return results[:1]
    results = results[len(arrays_of(instruction.operands)) :]
    while len(results) > 1 and results[-1].dtype in ("u32", "s32") and not results[-1].shape:
        results = results[:-1]
    return results


def arrays_of(instructions: Sequence[Instruction]) -> _Arrays:
    """Returns the results of all of some instructions."""
    return [array for instruction in instructions for array in instruction.results]


def _outside(arrays: _Arrays) -> float:
    return sum(array.bytes for array in arrays if not array.on_chip)


def _whole(arrays: _Arrays) -> float:
    return sum(array.bytes for array in arrays)


def _read(fused: Computation, number: int, operand: _Arrays) -> float:
    """Returns the bytes that a fusion reads of an operand."""
    outside = _outside(operand)
    if not outside or number not in fused.parameters:
        return outside
    sliced = _sliced(fused.parameters[number])
    return outside if sliced is None else min(outside, sliced)


def _sliced(value: Instruction) -> float | None:
    """Returns the bytes read of an array that a fusion only slices or updates; else None."""
    users = [i for i in value.computation.instructions.values() if value in i.operands]
    total = 0.0
    for user in users:
        only_first = user.operands[0] is value and value not in user.operands[1:]
        if user.opcode in _SLICES and only_first:
            total += _whole(user.results)
        elif user.opcode in ("bitcast", "fusion"):
            inner = _sliced_inside(user, value)
            if inner is None:
                return None
            total += inner
        elif not (user.opcode == "dynamic-update-slice" and only_first and _is_result(user)):
            return None
    return total if users else None


def _sliced_inside(user: Instruction, value: Instruction) -> float | None:
    """Returns the bytes read of an array by the users of its bitcast, or in a nested fusion."""
    if user.opcode == "bitcast":
        return None if user.is_root else _sliced(user)
    parameters = user.fused.parameters
    places = [number for number, operand in enumerate(user.operands) if operand is value]
    read = [_sliced(parameters[number]) for number in places]
    return None if None in read else sum(filter(None, read))


def _is_result(instruction: Instruction) -> bool:
    return instruction.is_root or instruction in instruction.computation.root.operands


def _written(root: Instruction, results: _Arrays) -> float:
    """Returns the bytes that a fusion writes: of arrays updated in place only the updates."""
    if root.opcode == "tuple" and len(root.operands) == len(results):
        parts = zip(root.operands, results, strict=True)
        return sum(_written(part, (result,)) for part, result in parts)
    outside = _outside(results)
    if root.opcode == "bitcast":
        return _written(root.operands[0], results)
    if root.opcode == "fusion" and len(root.results) == len(results):
        return _written(root.fused.root, results)
    if root.opcode == "dynamic-update-slice":
        updated = root.operands[0]
        while updated.opcode == "bitcast":
            updated = updated.operands[0]
        if updated.opcode == "parameter":
            return min(outside, _whole(root.operands[1].results))
    return outside

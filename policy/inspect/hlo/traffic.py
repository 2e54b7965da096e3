"""Counts the bytes that an instruction of a compiled program moves to and from memory, by the
shapes in its text.
"""

from __future__ import annotations

from policy.inspect.hlo.text import Computation, HloArray, Instruction

_SLICES = ("dynamic-slice", "slice", "gather")
_LIBRARIES = ("__cublas", "__cudnn")


def moved(
    computations: dict[str, Computation], inside: Computation, instruction: Instruction
) -> float:
    """Returns the bytes that a kernel reads and writes; on-chip memory is free.

    For an operand that is only sliced the slices count, for one that is updated in place the
    update.
    """
    operands = _operands(inside, instruction)
    opcode, results = instruction.opcode.removesuffix("-start"), produced(inside, instruction)
    if opcode in _SLICES:
        source = operands[0].results
        return (
            _outside(results)
            + min(_outside(source), _whole(results))
            + _outside(_all(operands[1:]))
        )
    if opcode == "dynamic-update-slice":
        update = operands[1].results
        return _outside(update) + min(_outside(results), _whole(update))
    if opcode == "fusion":
        fused = computations[instruction.called["calls"][0]]
        read = (
            _read(computations, fused, number, operand.results)
            for number, operand in enumerate(operands)
        )
        return sum(read) + _written(computations, fused, fused.root, results)
    if opcode == "custom-call" and instruction.target.startswith(_LIBRARIES):
        results = (
            tuple(array for array in results if array.dtype not in ("s8", "u8")) or results
        )  # not workspaces
    return _outside(_all(operands)) + _outside(results)


def produced(inside: Computation, instruction: Instruction) -> tuple[HloArray, ...]:
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
    results = results[len(_all(_operands(inside, instruction))) :]
    while len(results) > 1 and results[-1].dtype in ("u32", "s32") and not results[-1].shape:
        results = results[:-1]
    return results


def _operands(inside: Computation, instruction: Instruction) -> list[Instruction]:
    return [
        inside.instructions[name] for name in instruction.operands if name in inside.instructions
    ]


def _all(instructions: list[Instruction]) -> tuple[HloArray, ...]:
    return tuple(array for instruction in instructions for array in instruction.results)


def _outside(arrays: tuple[HloArray, ...]) -> float:
    return sum(array.bytes for array in arrays if not array.on_chip)


def _whole(arrays: tuple[HloArray, ...]) -> float:
    return sum(array.bytes for array in arrays)


def _read(
    computations: dict[str, Computation],
    fused: Computation,
    number: int,
    operand: tuple[HloArray, ...],
) -> float:
    """Returns the bytes that a fusion reads of an operand."""
    outside = _outside(operand)
    if not outside or number not in fused.parameters:
        return outside
    sliced = _sliced(computations, fused, fused.parameters[number].name)
    return outside if sliced is None else min(outside, sliced)


def _sliced(computations: dict[str, Computation], fused: Computation, name: str) -> float | None:
    """Returns the bytes read of an array that a fusion only slices or updates; else None."""
    users = [user for user in fused.instructions.values() if name in user.operands]
    total = 0.0
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == name and name not in user.operands[1:]:
            total += _whole(user.results)
        elif user.opcode == "bitcast":
            inner = None if user.is_root else _sliced(computations, fused, user.name)
            if inner is None:
                return None
            total += inner
        elif user.opcode == "fusion":
            nested = computations[user.called["calls"][0]]
            for number, operand in enumerate(user.operands):
                inner = (
                    _sliced(computations, nested, nested.parameters[number].name)
                    if operand == name
                    else 0.0
                )
                if inner is None:
                    return None
                total += inner
        elif not _updated_in_place(fused, user, name):
            return None
    return total if users else None


def _updated_in_place(fused: Computation, update: Instruction, name: str) -> bool:
    is_result = update.is_root or update.name in fused.root.operands
    of_it = (
        update.opcode == "dynamic-update-slice"
        and update.operands[0] == name
        and name not in update.operands[1:]
    )
    return is_result and of_it


def _written(
    computations: dict[str, Computation],
    fused: Computation,
    root: Instruction,
    results: tuple[HloArray, ...],
) -> float:
    """Returns the bytes that a fusion writes: of arrays updated in place only the updates."""
    if root.opcode == "tuple" and len(root.operands) == len(results):
        parts = zip(root.operands, results, strict=True)
        return sum(
            _written(computations, fused, fused.instructions[name], (result,))
            for name, result in parts
        )
    outside = _outside(results)
    if root.opcode == "bitcast":
        return _written(computations, fused, fused.instructions[root.operands[0]], results)
    if root.opcode == "fusion" and len(root.results) == len(results):
        nested = computations[root.called["calls"][0]]
        return _written(computations, nested, nested.root, results)
    if root.opcode == "dynamic-update-slice" and _is_parameter(fused, root.operands[0]):
        return min(outside, _whole(fused.instructions[root.operands[1]].results))
    return outside


def _is_parameter(fused: Computation, name: str) -> bool:
    instruction = fused.instructions[name]
    while instruction.opcode == "bitcast":
        instruction = fused.instructions[instruction.operands[0]]
    return instruction.opcode == "parameter"

"""Finds the operation that makes a value of a compiled program."""

from __future__ import annotations

import re

from policy._hlo.allocations import Place
from policy._hlo.text import Computation, Instruction

_COSTLY = ("dot", "convolution", "custom-call", "reduce", "scatter", "gather", "sort")
_LOOKED_THROUGH = (
    *("copy", "copy-start", "copy-done", "bitcast", "convert", "transpose", "reshape", "slice"),
    *("optimization-barrier", "opt-barrier", "async-done", "slice-done", "all-gather-done"),
)


class Makers:
    """The named instructions that values come from.

    Args:
      computations: of the program, by name.
      entry: the one that runs first.
    """

    def __init__(self, computations: dict[str, Computation], entry: Computation):
        self.computations = computations
        self.holders = {
            name: computation
            for computation in computations.values()
            for name in computation.instructions
        }
        self.callers = {
            called: (holder, instruction)
            for holder in computations.values()
            for instruction in holder.instructions.values()
            for names in instruction.called.values()
            for called in names
        }
        self.arguments = {i.op_name for i in entry.parameters.values()}

    def maker_of(self, place: Place) -> Instruction | None:
        """Returns the named instruction that makes a value.

        A fusion without a name has that of its root, or of its costliest operation; a loop's state
        that of what its body adds to it; a copy that of what is copied.

        Returns:
          the instruction itself if there is no name; None if there is no such instruction.
        """
        found = self._named(place, set())
        holder = self.holders.get(place[0])
        return found or (holder.instructions[place[0]] if holder else None)

    def _named(self, place: Place, seen: set[Place]) -> Instruction | None:
        name, index = place
        if place in seen or name not in self.holders:
            return None
        seen.add(place)
        holder = self.holders[name]
        instruction = holder.instructions[name]
        opcode = instruction.opcode
        if opcode in ("tuple", "get-tuple-element", "while", "conditional", "call", "parameter"):
            return self._through(holder, instruction, index, seen)
        if opcode == "fusion":
            return self._fused(instruction, index)
        if self._is_named(instruction):
            return instruction
        if opcode in _LOOKED_THROUGH and instruction.operands:
            return self._named((instruction.operands[0], ()), seen)
        return None

    def _is_named(self, instruction: Instruction) -> bool:
        return bool(instruction.op_name) and instruction.op_name not in self.arguments

    def _through(
        self, holder: Computation, instruction: Instruction, index: tuple[int, ...], seen: set[Place]
    ) -> Instruction | None:
        """Returns the maker of a part of a tuple, or of a result of a computation."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            number = re.search(r"index=(\d+)", instruction.rest)
            return self._named((operands[0], (int(number[1]), *index)), seen) if number else None
        if opcode == "tuple":
            return self._named((operands[index[0]], index[1:]), seen) if index else None
        if opcode == "parameter":
            return self._entering(holder, instruction, index, seen)
        for key in ("body", "branch_computations", "to_apply", "called_computations"):
            for called in instruction.called.get(key, ()):
                if found := self._named((self.computations[called].root.name, index), seen):
                    return found
        return self._named((operands[0], index), seen) if opcode == "while" else None

    def _entering(
        self, holder: Computation, parameter: Instruction, index: tuple[int, ...], seen: set[Place]
    ) -> Instruction | None:
        """Returns the maker of a computation's argument: of a loop's, what its body returns."""
        if holder.name not in self.callers:
            return None
        _, caller = self.callers[holder.name]
        if caller.opcode == "while":
            return self._named((caller.name, index), seen)
        number = int(parameter.literal) + (caller.opcode == "conditional")
        return self._named((caller.operands[number], index), seen)

    def _fused(self, fusion: Instruction, index: tuple[int, ...] = ()) -> Instruction | None:
        fused = self.computations[fusion.called["calls"][0]]
        root = fused.root
        if index and root.opcode == "tuple":
            root = fused.instructions[root.operands[index[0]]]
            if self._is_named(root):
                return root
        if self._is_named(fusion):
            return fusion
        return root if self._is_named(root) else self._costliest(fused)

    def _costliest(self, fused: Computation) -> Instruction | None:
        inside = [
            self._fused(i) if i.opcode == "fusion" else i for i in fused.instructions.values()
        ]
        named = [i for i in inside if i is not None and self._is_named(i)]
        return max(named, key=_cost, default=None)


def _cost(instruction: Instruction) -> tuple[bool, float]:
    return instruction.opcode in _COSTLY, sum(array.bytes for array in instruction.results)

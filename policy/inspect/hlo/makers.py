"""Finds the operation that makes a value of a compiled program."""

from __future__ import annotations

import dataclasses
import re

from policy.inspect.hlo.allocations import ResultPlace
from policy.inspect.hlo.text import Computation, Instruction

_COSTLY = ("dot", "convolution", "custom-call", "reduce", "scatter", "gather", "sort")
# Instructions that move or convert a value, of which XLA adds some without a name.
_MOVING = ("copy", "convert", "transpose", "reshape", "slice", "all-gather", "broadcast", "pad")
_WITHOUT_EFFECT = ("bitcast", "optimization-barrier", "opt-barrier")
# Names that a loop and a call give to whatever belongs to them.
_OF_LOOPS = re.compile(
    r"(?:/jit\(dynamic_update_index_in_dim\)/broadcast_in_dim|/while|/while/(?:body|cond)|"
    r"/closed_call|/eval_jaxpr|/checkpoint)$"
)
_STACKING = "/jit(dynamic_update_index_in_dim)/dynamic_update_slice"
_PASSING = (
    *("tuple", "get-tuple-element", "while", "conditional", "call", "parameter"),
    *("async-start", "async-update", "async-done"),
)


@dataclasses.dataclass(frozen=True)
class Maker:
    """The maker of a value.

    Attributes:
      instruction: one with a name; or a parameter of the program, if it is an argument that is
        moved or converted; or the value's own one.
      moving: the instruction without a name, as "convert", by which XLA moves or converts the
        result of `instruction`; "" if there is none.
      stacked: the maker of the slice, if `instruction` writes one into an array.
    """

    instruction: Instruction
    moving: str = ""
    stacked: Instruction | None = None


class Makers:
    """The makers of a program's values.

    Args:
      computations: of the program, by name.
      entry: the one that runs first.
    """

    def __init__(self, computations: dict[str, Computation], entry: Computation):
        self.computations, self.entry = computations, entry
        self.holders = {
            name: computation
            for computation in computations.values()
            for name in computation.instructions
        }
        self.callers = {
            called: instruction
            for holder in computations.values()
            for instruction in holder.instructions.values()
            for names in instruction.called.values()
            for called in names
        }
        self.labels = {i.op_name for i in entry.parameters.values()}

    def maker_of(self, place: ResultPlace) -> Maker | None:
        """Returns the maker of a value.

        A fusion without a name has that of its root, or of its costliest operation; a loop's state
        that of its body's result.

        Returns:
          None if the program has no such instruction.
        """
        holder = self.holders.get(place[0])
        if holder is None:
            return None
        return self._made(place, set()) or Maker(holder.instructions[place[0]])

    def _made(self, place: ResultPlace, seen: set[ResultPlace]) -> Maker | None:
        name, index = place
        if place in seen or name not in self.holders:
            return None
        seen.add(place)
        holder = self.holders[name]
        instruction = holder.instructions[name]
        if instruction.opcode in _PASSING:
            found = self._passed(holder, instruction, index, seen)
            return found or (Maker(instruction) if self._is_named(instruction) else None)
        if instruction.opcode == "fusion":
            return self._fused(instruction, index, seen)
        if self._is_named(instruction):
            return Maker(instruction, stacked=self._stacked(instruction))
        return self._moved(instruction, instruction.opcode, seen)

    def _is_named(self, instruction: Instruction) -> bool:
        name = instruction.op_name
        if not name or name in self.labels or _OF_LOOPS.search(name):
            return False
        return not (name.endswith(_STACKING) and instruction.opcode in (*_MOVING, *_WITHOUT_EFFECT))

    def _moved(self, instruction: Instruction, opcode: str, seen: set[ResultPlace]) -> Maker | None:
        """Returns the maker of the value that an instruction without a name moves or converts."""
        opcode = re.sub("-(start|done)$", "", opcode)
        if not instruction.operands or opcode not in (*_MOVING, *_WITHOUT_EFFECT):
            return None
        found = self._made(_operand(instruction, 0), seen)
        if found is None or opcode in _WITHOUT_EFFECT:
            return found
        return dataclasses.replace(found, moving=opcode)

    def _passed(
        self,
        holder: Computation,
        instruction: Instruction,
        index: tuple[int, ...],
        seen: set[ResultPlace],
    ) -> Maker | None:
        """Returns the maker of a part of a tuple, or of a result of a computation."""
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            number = re.search(r"index=(\d+)", instruction.rest)
            whole, inner = _operand(instruction, 0)
            return self._made((whole, (*inner, int(number[1]), *index)), seen) if number else None
        if opcode == "tuple":
            return self._made(_operand(instruction, *index), seen) if index else None
        if opcode == "parameter":
            return self._entering(holder, instruction, index, seen)
        if opcode.startswith("async"):
            return self._asynchronous(instruction, index, seen)
        for key in ("body", "branch_computations", "to_apply", "called_computations"):
            for called in instruction.called.get(key, ()):
                if found := self._made((self.computations[called].root.name, index), seen):
                    return found
        return self._made(_operand(instruction, 0, *index), seen) if opcode == "while" else None

    def _asynchronous(
        self, instruction: Instruction, index: tuple[int, ...], seen: set[ResultPlace]
    ) -> Maker | None:
        """Returns the maker of a result of an operation that runs beside others.

        Its start returns its operands, its results and a context.
        """
        if instruction.opcode == "async-done":
            return self._made(_operand(instruction, 0, 1, *index), seen)
        if instruction.opcode == "async-update":
            return self._made(_operand(instruction, 0, *index), seen)
        called = instruction.called.get("calls", ())
        if index[:1] != (1,) or not called:
            return None
        return self._made((self.computations[called[0]].root.name, index[1:]), seen)

    def _entering(
        self,
        holder: Computation,
        parameter: Instruction,
        index: tuple[int, ...],
        seen: set[ResultPlace],
    ) -> Maker | None:
        """Returns the maker of a computation's argument: of a loop's, of its body's result."""
        if holder is self.entry:
            return Maker(parameter)
        caller = self.callers.get(holder.name)
        if caller is None:
            return None
        if caller.opcode == "while":
            return self._made((caller.name, index), seen)
        number = int(parameter.literal) + (caller.opcode == "conditional")
        return self._made(_operand(caller, number, *index), seen)

    def _fused(
        self, fusion: Instruction, index: tuple[int, ...], seen: set[ResultPlace]
    ) -> Maker | None:
        fused = self.computations[fusion.called["calls"][0]]
        root = fused.root
        if index and root.opcode == "tuple":
            root = fused.instructions[root.operands[index[0]]]
        candidates = (root, fusion) if index else (fusion, root)
        named = next(filter(self._is_named, candidates), None) or self._costliest(fused)
        if named is not None:
            return Maker(named, stacked=self._stacked(_unmoved(fused, root)))
        return self._moved(fusion, _moving(fused, root), seen)

    def _costliest(self, fused: Computation) -> Instruction | None:
        inside = list(fused.instructions.values())
        for fusion in [i for i in inside if i.opcode == "fusion"]:
            found = self._costliest(self.computations[fusion.called["calls"][0]])
            inside += [found] if found else []
        return max(filter(self._is_named, inside), key=_cost, default=None)

    def _stacked(self, instruction: Instruction) -> Instruction | None:
        """Returns the maker of the slice that an instruction writes into an array."""
        if instruction.opcode != "dynamic-update-slice":
            return None
        found = self._made(_operand(instruction, 1), set())
        return found.instruction if found and self._is_named(found.instruction) else None


def _operand(instruction: Instruction, number: int, *index: int) -> ResultPlace:
    """Returns the place of an operand, or of a part of it."""
    return instruction.operands[number], index


def _unmoved(fused: Computation, root: Instruction) -> Instruction:
    """Returns the instruction whose result a fusion's root moves or converts."""
    while root.opcode in (*_MOVING, *_WITHOUT_EFFECT) and len(root.operands) == 1:
        root = fused.instructions[root.operands[0]]
    return root


def _moving(fused: Computation, root: Instruction) -> str:
    """Returns the opcode of a fusion that only moves or converts; "fusion" of others."""
    opcodes = {i.opcode for i in fused.instructions.values()}
    moving = [opcode for opcode in _MOVING if opcode in opcodes]
    if opcodes - {*_MOVING, *_WITHOUT_EFFECT, "parameter"} or len(fused.parameters) != 1:
        return "fusion"
    return root.opcode if root.opcode in moving else next(iter(moving), "bitcast")


def _cost(instruction: Instruction) -> tuple[bool, float]:
    return instruction.opcode in _COSTLY, sum(array.bytes for array in instruction.results)

"""Finds the operation that makes a value of a compiled program."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from policy.inspect.hlo.allocations import ResultPlace
from policy.inspect.hlo.text import Computation, Instruction, Module

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


# An instruction, and the index in its result if that is a tuple.
_Part = tuple[Instruction, tuple[int, ...]]


class Makers:
    """The makers of a program's values."""

    def __init__(self, program: Module):
        self.program = program
        self.labels = {i.op_name for i in program.entry.parameters.values()}

    def maker_of(self, place: ResultPlace) -> Maker | None:
        """Returns the maker of a value.

        A fusion without a name has that of its root, or of its costliest operation; a loop's state
        that of its body's result.

        Returns:
          None if the program has no such instruction.
        """
        name, index = place
        instruction = self.program.instructions.get(name)
        if instruction is None:
            return None
        return self._made((instruction, index), set()) or Maker(instruction)

    def _made(self, part: _Part, seen: set[_Part]) -> Maker | None:
        if part in seen:
            return None
        seen.add(part)
        instruction, index = part
        if instruction.opcode in _PASSING:
            found = self._passed(instruction, index, seen)
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

    def _moved(self, instruction: Instruction, opcode: str, seen: set[_Part]) -> Maker | None:
        """Returns the maker of the value that an instruction without a name moves or converts."""
        opcode = re.sub("-(start|done)$", "", opcode)
        if not instruction.operands or opcode not in (*_MOVING, *_WITHOUT_EFFECT):
            return None
        found = self._made((instruction.operands[0], ()), seen)
        if found is None or opcode in _WITHOUT_EFFECT:
            return found
        return dataclasses.replace(found, moving=opcode)

    def _passed(
        self, instruction: Instruction, index: tuple[int, ...], seen: set[_Part]
    ) -> Maker | None:
        """Returns the maker of what a tuple, a computation, or one's parameter passes on."""
        for part in _sources(instruction, index):
            if found := self._made(part, seen):
                return found
        is_argument = instruction.opcode == "parameter" and (
            instruction.computation is self.program.entry
        )
        return Maker(instruction) if is_argument else None

    def _fused(self, fusion: Instruction, index: tuple[int, ...], seen: set[_Part]) -> Maker | None:
        root = fusion.fused.root
        if index and root.opcode == "tuple":
            root = root.operands[index[0]]
        candidates = (root, fusion) if index else (fusion, root)
        named = next(filter(self._is_named, candidates), None) or self._costliest(fusion.fused)
        if named is not None:
            return Maker(named, stacked=self._stacked(_unmoved(root)))
        return self._moved(fusion, _moving(fusion.fused, root), seen)

    def _costliest(self, fused: Computation) -> Instruction | None:
        inside = list(fused.instructions.values())
        for fusion in [i for i in inside if i.opcode == "fusion"]:
            found = self._costliest(fusion.fused)
            inside += [found] if found else []
        return max(filter(self._is_named, inside), key=_cost, default=None)

    def _stacked(self, instruction: Instruction) -> Instruction | None:
        """Returns the maker of the slice that an instruction writes into an array."""
        if instruction.opcode != "dynamic-update-slice":
            return None
        found = self._made((instruction.operands[1], ()), set())
        return found.instruction if found and self._is_named(found.instruction) else None


def _sources(instruction: Instruction, index: tuple[int, ...]) -> Iterator[_Part]:
    """Yields what a part of an instruction's result may be."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "get-tuple-element":
        yield operands[0], (instruction.index, *index)
    elif opcode == "tuple":
        if index:
            yield operands[index[0]], index[1:]
    elif opcode == "parameter":
        yield from _arguments(instruction, index)
    elif opcode == "async-done":  # a start returns its operands, its results and a context
        yield operands[0], (1, *index)
    elif opcode == "async-update":
        yield operands[0], index
    elif opcode == "async-start":
        if index[:1] == (1,):
            yield from ((called.root, index[1:]) for called in instruction.called.get("calls", ()))
    else:
        for key, computations in instruction.called.items():
            if key != "condition":
                yield from ((called.root, index) for called in computations)
        if opcode == "while":
            yield operands[0], index


def _arguments(parameter: Instruction, index: tuple[int, ...]) -> Iterator[_Part]:
    """Yields what is passed to a computation's parameter; for a loop's, the loop's result."""
    caller = parameter.computation.caller
    if caller is None:
        return
    if caller.opcode == "while":
        yield caller, index
    else:
        yield caller.operands[int(parameter.literal) + (caller.opcode == "conditional")], index


def _unmoved(root: Instruction) -> Instruction:
    """Returns the instruction whose result a fusion's root moves or converts."""
    while root.opcode in (*_MOVING, *_WITHOUT_EFFECT) and len(root.operands) == 1:
        root = root.operands[0]
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

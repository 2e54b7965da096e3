"""Finds what an instruction of a compiled program was made for: the operation that makes a value,
its module path, and the line of the user's code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from policy.inspect.hlo.dump import ResultPlace
from policy.inspect.hlo.kernels import add_to
from policy.inspect.hlo.text import Instruction, Module
from policy.inspect.traced.authors import users_line
from policy.inspect.traced.module_paths import lost_prefixes, module_path
from policy.programs.paths import Path, naming, path_of, spelled

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
# Names that JAX's lowering gives to the parts of control flow, inside of which names are relative.
_CONTROL_FLOW = re.compile(
    r"/(?:while/(?:body_pred|body|cond)|cond/branch_\d+_fun|shard_map|closed_call|eval_jaxpr)"
    r"(?=/|$)"
)
# Names of calls and of loops' parts, which are no operations.
_CALLS = re.compile(
    r"checkpoint|rematted_computation|body|cond|body_pred|branch_\d+_fun|closed_call|eval_jaxpr|"
    r"core_call|custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|pjit"
)


# --------------------------------------------------------------------------------------------------
# Module paths
# --------------------------------------------------------------------------------------------------


def path_in_program(op_name: str) -> Path:
    """Returns the module path in an instruction's `op_name`, ``jit(step)/jvp(Net)/layer/mul``.

    The last name is that of the operation; arguments, whose names begin with no transformation,
    have no path. Of the names of instructions that XLA made one, the first counts.
    """
    op_name = op_name.split(";")[0]
    if not re.match(r"p?jit\(|shard_map", op_name):
        return ()
    path: Path = ()
    is_backward = "transpose(" in op_name
    parts = _CONTROL_FLOW.sub("/\n", op_name).split("/\n")
    for place, part in enumerate(parts):
        names = part if place + 1 < len(parts) else part.rpartition("/")[0]
        path = module_path(path_of(names.strip("/"), path), is_backward)
    return path


def operation_in_program(op_name: str) -> str:
    """Returns the JAX operation in an instruction's `op_name`; "" if it names a call or a part of a
    loop.
    """
    name = op_name.rpartition("/")[2]
    return name if re.fullmatch(r"[\w\-]+", name) and not _CALLS.fullmatch(name) else ""


def path_of_kernel(kernel: Instruction) -> Path:
    """Returns the module path of a kernel: of its own name, or else of the last operation in the
    fusion that has one.
    """
    inner = []
    if fused := kernel.called.get("calls"):
        inner = [fused[0].root, *reversed(fused[0].instructions.values())]
    for instruction in (kernel, *inner):
        if path := path_in_program(instruction.op_name):
            return path
        if instruction.op_name.startswith(("jit(", "pjit(")):
            return ()
    return ()


def with_whole_paths(costs: Mapping[Path, float]) -> dict[Path, float]:
    """Returns costs by path; a path that lost its beginning in a differentiated loop is whole."""
    whole, found = lost_prefixes(costs), {}
    for path, cost in costs.items():
        add_to(found, {whole.get(path, path): cost})
    return found


def by_spelled_path(costs: Mapping[Path, float]) -> dict[str, float]:
    """Returns costs by path as reports print it, the largest first; "" is outside of any module."""
    found: dict[str, float] = {}
    with naming(costs):
        for path, cost in costs.items():
            add_to(found, {spelled(path): cost})
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# --------------------------------------------------------------------------------------------------
# Makers of values
# --------------------------------------------------------------------------------------------------


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

        The maker of a fusion without a name is that of the root, or the last operation with a name;
        of a loop's state, it is the maker of the body's result.

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
        if not index and instruction.opcode not in _PASSING and self._is_named(instruction):
            return Maker(instruction, stacked=self._stacked(instruction))
        for source in _sources(instruction, index):
            if found := self._made(source, seen):
                opcode = re.sub("-(start|done)$", "", instruction.opcode)
                return dataclasses.replace(found, moving=opcode) if opcode in _MOVING else found
        is_parameter = instruction.opcode == "parameter"
        if is_parameter and instruction.computation is self.program.entry:
            return Maker(instruction)
        is_fusion = instruction.opcode == "fusion"
        inside = reversed(instruction.fused.instructions.values()) if is_fusion else ()
        named = next(filter(self._is_named, (instruction, *inside)), None)
        return None if named is None else Maker(named)

    def _is_named(self, instruction: Instruction) -> bool:
        name = instruction.op_name
        if not name or name in self.labels or _OF_LOOPS.search(name):
            return False
        return not (name.endswith(_STACKING) and instruction.opcode in (*_MOVING, *_WITHOUT_EFFECT))

    def _stacked(self, instruction: Instruction) -> Instruction | None:
        """Returns the maker of the slice that an instruction writes into an array."""
        root = instruction.fused.root if instruction.opcode == "fusion" else instruction
        if root.opcode != "dynamic-update-slice":
            return None
        found = self._made((root.operands[1], ()), set())
        return found.instruction if found and self._is_named(found.instruction) else None


def _sources(instruction: Instruction, index: tuple[int, ...]) -> Iterator[_Part]:
    """Yields what a part of an instruction's result may be."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "get-tuple-element":
        yield operands[0], (instruction.index, *index)
    elif opcode == "tuple":
        if index:
            yield operands[index[0]], index[1:]
    elif opcode == "fusion":
        yield instruction.fused.root, index
    elif re.sub("-(start|done)$", "", opcode) in (*_MOVING, *_WITHOUT_EFFECT):
        yield from ((operand, ()) for operand in operands[:1])
    elif opcode == "parameter":
        caller = instruction.computation.caller
        if caller is not None and caller.opcode == "while":
            yield caller, index  # the loop's result
        elif caller is not None:
            place = int(instruction.literal) + (caller.opcode == "conditional")
            yield caller.operands[place], index
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


# --------------------------------------------------------------------------------------------------
# Lines of the user's code
# --------------------------------------------------------------------------------------------------


class SourceFrames:
    """The tables of stack frames at the head of a program's text.

    Args:
      text: of the program. Its instructions refer to the tables, or, of older compilers, hold a
        file and a line.
    """

    def __init__(self, text: str):
        self.files = {key: row.strip('"') for key, row in _rows(text, "FileNames")}
        self.functions = {key: row.strip('"') for key, row in _rows(text, "FunctionNames")}
        self.locations = {key: _fields(row) for key, row in _rows(text, "FileLocations")}
        self.frames = {key: _fields(row) for key, row in _rows(text, "StackFrames")}
        # Frames come after their parents. XLA prints a parent's number plus one.
        parents = ((key, frame.get("parent_frame_id", 0)) for key, frame in self.frames.items())
        self.shift = 1 if any(parent >= key for key, parent in parents) else 0

    def source_of(self, instruction: Instruction) -> str:
        """Returns the line of the user's code, as ``model.py:12 (Net.__call__)``; "" if it is
        unknown.
        """
        if frame := instruction.attribute(r"stack_frame_id=(\d+)"):
            return users_line(self._outwards(int(frame)))
        file = instruction.attribute(r'source_file="([^"]*)"')
        line = instruction.attribute(r"source_line=(\d+)")
        return users_line([(file, int(line), "")]) if file and line else ""

    def _outwards(self, frame: int) -> Iterator[tuple[str, int, str]]:
        """Yields the frames from the innermost to the outermost."""
        while frame in self.frames:
            fields = self.frames[frame]
            location = self.locations.get(fields.get("file_location_id", 0), {})
            file = self.files.get(location.get("file_name_id", 0), "")
            function = self.functions.get(location.get("function_name_id", 0), "")
            if file:
                yield file, location.get("line", 0), function
            parent = fields.get("parent_frame_id", 0) - self.shift
            frame = parent if parent < frame else 0


def _rows(text: str, table: str) -> Iterator[tuple[int, str]]:
    """Yields the rows of a table by their numbers."""
    found = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    for row in found[1].splitlines() if found else ():
        number, _, rest = row.partition(" ")
        yield int(number), rest


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}

"""A program as one list of operations without casts, the form in which two programs are paired."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from policy.programs.paths import Path, path_of
from policy.programs.placed_interpreter import EnclosingEquations, module_path
from policy.programs.primitives import INLINED, LOOPS_AND_BRANCHES, REMATS, VIEWS
from policy.programs.protocols import Equation
from policy.programs.subprograms import Subprogram, opened, subprograms
from policy.programs.upcast import dtype_of
from policy.programs.walk import written_at

# The maker of a value, and the index among its results.
Token = tuple[Any, ...]


class Known:
    """A literal, equal only to itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = np.asarray(value)

    @property
    def key(self) -> Token:
        return "literal", self.value.dtype, self.value.tobytes()


class Operand(NamedTuple):
    """A value that is read: its root, and the casts and views between."""

    root: Any
    views: tuple[Any, ...] = ()

    @property
    def shapes(self) -> Token:
        """The views that repeat numbers, by name and shape."""
        sizes = [
            (view.primitive.name, view.invars[0].aval, view.outvars[0].aval) for view in self.views
        ]
        return tuple(
            (name, given.shape) for name, taken, given in sizes if taken.size != given.size
        )


@dataclasses.dataclass(eq=False, repr=False)  # its text would hold the whole program
class FlatOperation:
    """An equation that computes something.

    Attributes:
      equation: itself.
      operands: the values that it reads.
      path: of the module that it stands in.
      is_backward: whether it belongs to the backward pass.
      is_again: whether a checkpoint computes it again.
      at: the `id`s of the equations around it, and its own.
      around: the loop or conditional that it stands in.
      bodies: of a loop or a conditional, the results of its programs.
      carried: how many values a loop carries; they are `("carry", operation, i)` inside of it.
      stacked: the rows that a scan returns.
    """

    equation: Equation
    operands: list[Operand]
    path: Path
    is_backward: bool
    is_again: bool
    at: tuple[EnclosingEquations, int]
    around: FlatOperation | None = None
    bodies: list[list[Operand]] = dataclasses.field(default_factory=list)
    carried: int = 0
    stacked: list[Token] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def kind(self) -> Token:
        """A key that an operation shares with its counterpart in another trace of the same code."""
        if self.bodies:
            return self.name, self.path, self.is_backward, self.is_again
        shapes = tuple(getattr(v.aval, "shape", None) for v in self.equation.outvars)
        return self.name, self.path, self.is_backward, self.is_again, shapes


@dataclasses.dataclass
class Flattened:
    """A program's operations in order, without those that nothing depends on.

    Attributes:
      operations: the operations.
      outputs: the program's results.
      made: the operation of each equation, by `FlatOperation.at`; of a recomputation, the first.
      inputs: the roots of the arguments of each body, by its position.
      consts: the arrays that programs inside of this one hold, by their `id`.
    """

    operations: list[FlatOperation]
    outputs: list[Operand]
    made: dict[tuple[EnclosingEquations, int], FlatOperation]
    inputs: dict[tuple[EnclosingEquations, int], list[Any]]
    consts: dict[int, Any]


def flattened(program: Any) -> Flattened:
    """Returns the operations of a jaxpr and of the programs inside it."""
    body, _ = opened(program)
    builder = _Builder()
    consts = [Operand(("const", i)) for i in range(len(body.constvars))]
    arguments = [Operand(("argument", i)) for i in range(len(body.invars))]
    builder.inputs[(), id(body)] = [operand.root for operand in arguments]
    outputs = builder.run(body, consts, arguments, _Around())
    operations = _live(builder.operations, outputs)
    return Flattened(operations, outputs, builder.made, builder.inputs, builder.consts)


class _Around(NamedTuple):
    """The position of a program: the place of its equation, and the equations around it."""

    path: Path = ()
    is_backward: bool = False
    is_again: bool = False
    chain: EnclosingEquations = ()
    loop: FlatOperation | None = None

    def place_of(self, equation: Equation) -> _Around:
        """Returns the position of a program inside of an equation."""
        stack = str(equation.source_info.name_stack)
        is_backward = self.is_backward or "transpose(" in stack
        is_again = self.is_again or "rematted_computation" in stack
        path = module_path(path_of(stack, self.path), is_backward)
        return _Around(path, is_backward, is_again, (*self.chain, id(equation)), self.loop)


class _Builder:
    def __init__(self) -> None:
        self.operations: list[FlatOperation] = []
        self.first: dict[Token, FlatOperation] = {}
        self.made: dict[tuple[EnclosingEquations, int], FlatOperation] = {}
        self.inputs: dict[tuple[EnclosingEquations, int], list[Any]] = {}
        self.consts: dict[int, Any] = {}

    def run(
        self, jaxpr: Any, consts: Sequence[Operand], arguments: Sequence[Operand], around: _Around
    ) -> list[Operand]:
        """Flattens an open jaxpr, and returns its outputs."""
        values: dict[Any, Operand] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True)
        )

        def read(atom: Any) -> Operand:
            return Operand(Known(atom.val)) if isinstance(atom, jex_core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            if is_float_cast(equation) or equation.primitive.name in VIEWS:
                found = [Operand(operands[0].root, (*operands[0].views, equation))]
            else:
                found = self.equation(equation, operands, around.place_of(equation))
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(
        self, equation: Equation, operands: list[Operand], place: _Around
    ) -> list[Operand]:
        name, inside = equation.primitive.name, subprograms(equation)
        if name in INLINED or name in REMATS or name == "shard_map":
            return self.inner(inside[0], operands, place, is_scope=name not in INLINED)
        at = place.chain[:-1], id(equation)
        operation = FlatOperation(
            equation, operands, place.path, place.is_backward, place.is_again, at, place.loop
        )
        self.made[at] = operation
        if name in LOOPS_AND_BRANCHES:
            self.operations.append(operation)
            held = self.branches if name == "cond" else self.loop
            return held(operation, inside, place._replace(loop=operation))
        first = self.first.setdefault(_key(operation), operation)
        if place.is_again and first is not operation and not equation.effects:
            self.made[at] = first
            return _results(first)
        self.operations.append(operation)
        return _results(operation)

    def inner(
        self, one: Subprogram, arguments: Sequence[Operand], around: _Around, is_scope: bool = True
    ) -> list[Operand]:
        """Flattens a program inside of an equation, and returns its outputs.

        A scope is a body of its own when the program is run again.
        """
        self.consts.update({id(const): const for const in one.consts})
        if is_scope:
            self.inputs[around.chain, id(one.body)] = [
                None if o.shapes else o.root for o in arguments
            ]
        return self.run(
            one.body, [Operand(("inner", id(const))) for const in one.consts], arguments, around
        )

    def loop(
        self, operation: FlatOperation, inside: Sequence[Subprogram], place: _Around
    ) -> list[Operand]:
        loop = next(one for one in inside if one.role == "loop")
        operands, arguments = operation.operands, loop.given(operation.operands)
        operation.carried = loop.carried
        carry = [Operand(("carry", operation, i)) for i in range(loop.carried)]
        rows = [_element(operand, loop.count) for operand in arguments[loop.rows]]
        conds = [one for one in inside if one.role == "cond"]
        goes_on = [
            self.inner(one, [*one.given(operands)[one.fixed], *carry], place) for one in conds
        ]
        outputs = self.inner(loop, [*arguments[loop.fixed], *carry, *rows], place)
        operation.bodies = [outputs[: loop.carried], *goes_on]
        operation.operands = arguments[loop.carry]
        stacked = outputs[loop.carried :]
        operation.stacked = [("stacked", value.root, value.shapes, loop.count) for value in stacked]
        return [*_results(operation)[: loop.carried], *map(Operand, operation.stacked)]

    def branches(
        self, operation: FlatOperation, inside: Sequence[Subprogram], place: _Around
    ) -> list[Operand]:
        operation.bodies = [self.inner(one, one.given(operation.operands), place) for one in inside]
        operation.operands = operation.operands[:1]
        return _results(operation)


def is_float_cast(equation: Equation) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    source, target = dtype_of(equation.invars[0]), equation.params["new_dtype"]
    return source == target or all(
        jnp.issubdtype(dtype, jnp.floating) for dtype in (source, target)
    )


def _results(operation: FlatOperation) -> list[Operand]:
    return [Operand(("result", operation, i)) for i in range(len(operation.equation.outvars))]


def _element(operand: Operand, length: int) -> Operand:
    """Returns one row of an array that is scanned over.

    If another scan stacked the array, the row is the value that was stacked.
    """
    root = operand.root
    if (
        isinstance(root, tuple)
        and root[0] == "stacked"
        and (root[2], root[3], operand.shapes) == ((), length, ())
    ):
        return Operand(root[1])
    return Operand(("element", root, operand.shapes, length))


def _key(operation: FlatOperation) -> Token:
    operands = tuple(
        (o.root.key if isinstance(o.root, Known) else o.root, o.shapes) for o in operation.operands
    )
    equation = operation.equation
    params = tuple(
        (name, str(value)) for name, value in sorted(equation.params.items()) if not callable(value)
    )
    return equation.primitive.name, operands, params, written_at(equation)


def _live(operations: Sequence[FlatOperation], outputs: Iterable[Operand]) -> list[FlatOperation]:
    live: set[int] = set()
    waiting = [operand.root for operand in outputs]
    waiting += [("result", o, 0) for o in operations if o.equation.effects]
    while waiting:
        root = waiting.pop()
        if isinstance(root, Known):
            continue
        if root[0] in ("stacked", "element"):
            waiting.append(root[1])
        elif root[0] in ("result", "carry") and id(root[1]) not in live:
            live.add(id(root[1]))
            waiting += [operand.root for operand in _read_by(root[1])]
    return [operation for operation in operations if id(operation) in live]


def _read_by(operation: FlatOperation) -> Iterator[Operand]:
    yield from operation.operands
    for body in operation.bodies:
        yield from body

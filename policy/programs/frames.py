"""A program as a graph of values in frames, one for each run of a program, as rewriters meet them.

Unlike `policy.programs.graph`, it has no cycles (a carry has no maker: it stands for that of every
turn), keeps dead code, and keeps equations whole that autocast does not rewrite inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy.programs.dtypes import is_floating_dtype
from policy.programs.equations import equations_within
from policy.programs.primitives import ELEMENTWISE, FORWARDS, REWRITTEN_INSIDE
from policy.programs.protocols import OpenJaxpr
from policy.programs.subprograms import Subprogram, subprograms

# Pseudo-primitives: a value enters the body of a loop or a shard, and leaves it.
ENTER, LEAVE = "enter", "leave"
# Primitives that copy elements of their operand, some of them or several times.
MOVES = FORWARDS | {ENTER, LEAVE}


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Data:
    """A value of the program.

    Attributes:
      shape: its shape.
      is_float: whether it has a floating dtype.
      yields: whether it is made of parameters and literals alone.
      given: whether it is made of arguments and constants by elementwise operations and changes of
        shape alone.
      number: the literal that it is, or None.
      made_by: the operation that returned it, or None.
      readers: the operations that read it.
    """

    shape: tuple[Any, ...]
    is_float: bool
    yields: bool = False
    given: bool = False
    number: Any = None
    made_by: FrameOperation | None = None
    readers: list[FrameOperation] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class FrameOperation:
    """An equation, each time that its program is run.

    Attributes:
      name: the primitive's, `ENTER` or `LEAVE`.
      equation: itself; None for `ENTER` and `LEAVE`.
      inputs, outputs: the values that it reads and returns.
      frame: the program that it stands in.
      is_backward: whether it belongs to the backward pass of a derivative.
    """

    name: str
    equation: Any
    inputs: Sequence[Data]
    outputs: Sequence[Data]
    frame: Frame
    is_backward: bool


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Frame:
    """One run of a program.

    Attributes:
      operations: its own, in order.
      programs: the runs of those that its equations hold, by the identities of the equation and of
        the program.
    """

    operations: list[FrameOperation] = dataclasses.field(default_factory=list)
    programs: dict[tuple[int, int], Frame] = dataclasses.field(default_factory=dict)


class FrameGraph:
    """The operations of a program and of the programs inside it, in order.

    Attributes:
      operations: the operations.
      top: the frame of the program itself.
    """

    def __init__(self, jaxpr: OpenJaxpr, yields: Sequence[bool]):
        """Reads an open jaxpr; `yields` tells which of its arguments are parameters."""
        self.operations: list[FrameOperation] = []
        self.top = Frame()
        arguments = [
            _data(v.aval, is_param, True) for v, is_param in zip(jaxpr.invars, yields, strict=True)
        ]
        self._run(jaxpr, arguments, self.top, False)

    def _run(
        self, jaxpr: OpenJaxpr, arguments: Sequence[Data], frame: Frame, is_backward: bool
    ) -> list[Data]:
        known: dict[Any, Data] = {v: _data(v.aval, False, True) for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atoms: Iterable[Any]) -> list[Data]:
            return [
                _literal(atom) if isinstance(atom, jex_core.Literal) else known[atom]
                for atom in atoms
            ]

        for equation in jaxpr.eqns:
            inputs = read(equation.invars)
            stack = str(equation.source_info.name_stack)  # a recomputation counts as forward
            backward = (
                is_backward or "transpose(" in stack
            ) and "rematted_computation" not in stack
            name = equation.primitive.name
            outputs = (
                self._held(equation, inputs, frame, backward)
                if name in REWRITTEN_INSIDE
                else self._made(name, equation, inputs, equation.outvars, frame, backward)
            )
            known.update(zip(equation.outvars, outputs, strict=True))
        return read(jaxpr.outvars)

    def _made(
        self,
        name: str,
        equation: Any,
        inputs: Sequence[Data],
        variables: Iterable[Any],
        frame: Frame,
        backward: bool,
    ) -> list[Data]:
        outputs: list[Data] = []
        operation = FrameOperation(name, equation, inputs, outputs, frame, backward)
        has_float, floats_yield, all_yield, given = False, True, bool(inputs), True
        for data in inputs:
            has_float |= data.is_float
            floats_yield &= data.yields or not data.is_float
            all_yield &= data.yields
            given &= data.given
            data.readers.append(operation)
        # A row of a table is an activation, as it is for the evaluator.
        yields = (floats_yield if has_float else all_yield) and name != "gather"
        given = given and (name in MOVES or name in ELEMENTWISE)
        for variable in variables:
            output = _data(variable.aval, yields, given)
            output.made_by = operation
            outputs.append(output)
        frame.operations.append(operation)
        self.operations.append(operation)
        return outputs

    def _held(self, equation: Any, inputs: list[Data], frame: Frame, backward: bool) -> list[Data]:
        """Returns the outputs of an equation whose programs autocast rewrites."""
        inner = [
            self._inside(equation, one, inputs, frame, backward) for one in subprograms(equation)
        ]
        outputs = [found for found in inner if found is not None]
        is_run_once = all(one.role in ("call", "remat") for one in subprograms(equation))
        return (
            outputs[0]
            if is_run_once
            else self._joints(LEAVE, zip(*outputs, strict=True), equation.outvars, frame, backward)
        )

    def _inside(
        self, equation: Any, one: Subprogram, inputs: Sequence[Data], frame: Frame, backward: bool
    ) -> list[Data] | None:
        """Returns the results of an equation that one of its programs returns.

        Returns None for the condition of a loop, which returns no results.
        """
        given, variables = one.given(inputs), one.body.invars
        if one.role == "shard":
            given = self._joints(ENTER, zip(given), variables, frame, backward)
        elif one.role in ("loop", "cond"):
            carry = [
                _data(v.aval, False, False) for v in variables[one.carry]
            ]  # of every turn, not of the first
            rows = self._joints(ENTER, zip(given[one.rows]), variables[one.rows], frame, backward)
            given = [*given[one.fixed], *carry, *rows]
        inner = frame.programs.setdefault((id(equation), id(one.body)), Frame())
        outputs = self._run(one.body, given, inner, backward)
        return None if one.role == "cond" else outputs

    def _joints(
        self,
        name: str,
        inputs: Iterable[Sequence[Data]],
        variables: Sequence[Any],
        frame: Frame,
        backward: bool,
    ) -> list[Data]:
        return [
            self._made(name, None, data, [variable], frame, backward)[0]
            for data, variable in zip(inputs, variables, strict=True)
        ]


def _data(aval: Any, yields: bool, given: bool) -> Data:
    dtype = getattr(aval, "dtype", None)
    is_float = dtype is not None and is_floating_dtype(dtype)
    return Data(getattr(aval, "shape", ()), is_float, yields, given)


def _literal(atom: Any) -> Data:
    data = _data(atom.aval, True, True)
    data.number = atom.val if np.ndim(atom.val) == 0 else None
    return data


def holds(jaxpr: OpenJaxpr, names: frozenset[str]) -> bool:
    """Returns whether an open jaxpr, or one inside it, has one of these primitives."""
    return any(equation.primitive.name in names for equation in equations_within(jaxpr, once=True))

"""A program as one graph of values, through the programs that its equations hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy._jaxpr.primitives import ELEMENTWISE, FORWARDS, INLINED_BY_AUTOCAST, REMATS
from policy._jaxpr.subprograms import opened, programs_of, scan_arity
from policy.autocast.values import is_floating

# Their operands are those of the one program that they hold.
_INLINED = INLINED_BY_AUTOCAST | REMATS
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# A number that enters a loop's body or a shard's, and one that leaves it.
ENTER, LEAVE = "enter", "leave"
# They hand on the numbers of their operand, some of them or several times.
MOVES = FORWARDS | {ENTER, LEAVE}


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Data:
    """A value of the program.

    Attributes:
      shape: its shape.
      is_float: whether it has a floating dtype.
      yields: whether it is made of parameters and literals alone.
      given: whether it is made of arguments and constants by elementwise operations and changes of shape alone.
      number: the literal that it is, or None.
      made_by: the operation that returned it, or None.
      readers: the operations that read it.
      is_returned: whether the program returns it.
    """

    shape: tuple[Any, ...]
    is_float: bool
    yields: bool = False
    given: bool = False
    number: Any = None
    made_by: Operation | None = None
    readers: list[Operation] = dataclasses.field(default_factory=list)
    is_returned: bool = False


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Operation:
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
      programs: the runs of those that its equations hold, by the identities of the equation and of the program.
    """

    operations: list[Operation] = dataclasses.field(default_factory=list)
    programs: dict[tuple[int, int], Frame] = dataclasses.field(default_factory=dict)


class Graph:
    """The operations of a program in order, those of the programs in it included.

    Attributes:
      operations: the operations.
      top: the frame of the program itself.
    """

    def __init__(self, jaxpr: Any, yields: Sequence[bool]):
        """`jaxpr` is open; `yields` says for each of its arguments whether it is a parameter."""
        self.operations: list[Operation] = []
        self.top = Frame()
        arguments = [_data(v.aval, is_param, True) for v, is_param in zip(jaxpr.invars, yields, strict=True)]
        for output in self._run(jaxpr, arguments, self.top, False):
            output.is_returned = True

    def _run(self, jaxpr: Any, arguments: Sequence[Data], frame: Frame, is_backward: bool) -> list[Data]:
        known: dict[Any, Data] = {v: _data(v.aval, False, True) for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atoms: Iterable[Any]) -> list[Data]:
            return [_literal(atom) if isinstance(atom, jex_core.Literal) else known[atom] for atom in atoms]

        for equation in jaxpr.eqns:
            inputs = read(equation.invars)
            stack = str(equation.source_info.name_stack)  # JAX's own marks in it; what a checkpoint repeats is forward
            backward = (is_backward or "transpose(" in stack) and "rematted_computation" not in stack
            outputs = self._held(equation, inputs, frame, backward)
            if outputs is None:
                outputs = self._made(equation.primitive.name, equation, inputs, equation.outvars, frame, backward)
            known.update(zip(equation.outvars, outputs, strict=True))
        return read(jaxpr.outvars)

    def _made(
        self, name: str, equation: Any, inputs: Sequence[Data], variables: Iterable[Any], frame: Frame, backward: bool
    ) -> list[Data]:
        floats = [data for data in inputs if data.is_float] or inputs
        # A row of a table is an activation, as it is for the evaluator.
        yields = bool(floats) and all(data.yields for data in floats) and name != "gather"
        given = all(data.given for data in inputs) and (name in MOVES or name in ELEMENTWISE)
        outputs = [_data(v.aval, yields, given) for v in variables]
        operation = Operation(name, equation, inputs, outputs, frame, backward)
        for output in outputs:
            output.made_by = operation
        for data in inputs:
            data.readers.append(operation)
        frame.operations.append(operation)
        self.operations.append(operation)
        return outputs

    def _held(self, equation: Any, inputs: list[Data], frame: Frame, backward: bool) -> list[Data] | None:
        """Returns the outputs of an equation whose programs are looked into; None of other equations."""
        name, params = equation.primitive.name, equation.params
        if name in _INLINED:
            held = next(params[key] for key in _PROGRAMS if key in params)
            return self._inside(equation, held, inputs, frame, backward)
        if name == "scan":
            consts, carried = scan_arity(equation)
            return self._loop(equation, params["jaxpr"], inputs, (0, consts), carried, frame, backward)
        if name == "while":
            n, m = params["cond_nconsts"], params["body_nconsts"]
            carried = len(inputs) - n - m
            self._loop(
                equation, params["cond_jaxpr"], [*inputs[:n], *inputs[n + m :]], (0, n), carried, frame, backward
            )
            return self._loop(equation, params["body_jaxpr"], inputs[n:], (0, m), carried, frame, backward)
        if name == "cond":
            branches = [self._inside(equation, b, inputs[1:], frame, backward) for b in params["branches"]]
            return self._left(list(zip(*branches, strict=True)), equation.outvars, frame, backward)
        if name == "shard_map":
            body, _ = opened(params["jaxpr"])
            entered = self._entered(inputs, body.invars, frame, backward)
            outputs = self._inside(equation, params["jaxpr"], entered, frame, backward)
            return self._left([(output,) for output in outputs], equation.outvars, frame, backward)
        return None

    def _inside(self, equation: Any, held: Any, inputs: Sequence[Data], frame: Frame, backward: bool) -> list[Data]:
        body, _ = opened(held)
        inner = frame.programs.setdefault((id(equation), id(body)), Frame())
        return self._run(body, inputs, inner, backward)

    def _loop(
        self,
        equation: Any,
        held: Any,
        inputs: Sequence[Data],
        consts: tuple[int, int],
        carried: int,
        frame: Frame,
        backward: bool,
    ) -> list[Data]:
        body, _ = opened(held)
        first, after = consts[1], consts[1] + carried
        carry = [_data(v.aval, False, False) for v in body.invars[first:after]]  # of every turn, not of the first
        rows = self._entered(inputs[after:], body.invars[after:], frame, backward)
        outputs = self._inside(equation, held, [*inputs[:first], *carry, *rows], frame, backward)
        if len(outputs) != len(equation.outvars):  # the condition of a while
            return outputs
        return self._left([(output,) for output in outputs], equation.outvars, frame, backward)

    def _entered(self, inputs: Sequence[Data], variables: Sequence[Any], frame: Frame, backward: bool) -> list[Data]:
        pairs = zip(inputs, variables, strict=True)
        return [self._made(ENTER, None, [data], [variable], frame, backward)[0] for data, variable in pairs]

    def _left(
        self, outputs: Sequence[Sequence[Data]], variables: Sequence[Any], frame: Frame, backward: bool
    ) -> list[Data]:
        pairs = zip(outputs, variables, strict=True)
        return [self._made(LEAVE, None, data, [variable], frame, backward)[0] for data, variable in pairs]


def _data(aval: Any, yields: bool, given: bool) -> Data:
    dtype = getattr(aval, "dtype", None)
    is_float = dtype is not None and is_floating(dtype)
    return Data(tuple(getattr(aval, "shape", ())), is_float, yields, given)


def _literal(atom: Any) -> Data:
    data = _data(atom.aval, True, True)
    data.number = atom.val if np.ndim(atom.val) == 0 else None
    return data


def holds(jaxpr: Any, names: frozenset[str], known: dict[int, bool] | None = None) -> bool:
    """Returns whether an open jaxpr, or a program in it, has an equation of one of these primitives."""
    known = {} if known is None else known
    if id(jaxpr) not in known:
        known[id(jaxpr)] = False
        known[id(jaxpr)] = any(
            equation.primitive.name in names or any(holds(program, names, known) for program in programs_of(equation))
            for equation in jaxpr.eqns
        )
    return known[id(jaxpr)]

"""Interpreter of jaxprs: evaluates a program on values of another kind than arrays."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import numpy as np
from jax.extend import source_info_util

from policy.programs.jaxprs import Equation, OpenJaxpr, bind, opened
from policy.programs.primitives import BROADCASTS, CASTS, ELEMENTWISE, MATMULS, RESHAPES

V = TypeVar("V")
Notes = dict[int, Any]
_Operation = Callable[..., Sequence[Any]]

_COMPILED = ELEMENTWISE | MATMULS | CASTS | RESHAPES | BROADCASTS


class Interpreter(Generic[V]):
    """Evaluates jaxprs on values of type `V`, which hold arrays and further facts.

    A subclass says how an equation is evaluated (`equation`); where values are no arrays, how they
    hold some (`constant`, `arrays`, `filled`), and on which kinds of values loops and branches
    settle (`merge`, `settled`). Equations that hold programs are rebuilt by the functions of
    `policy.programs.rewriting.control_flow`.

    Attributes:
      notes: arrays that are reported beside the outputs of the program that is being traced, by a
        key of their own.
    """

    def __init__(self) -> None:
        self.notes: Notes = {}

    # Values ---------------------------------------------------------------------------------------

    def constant(self, array: Any) -> V:
        """Returns a constant of a jaxpr as a value."""
        return array

    def arrays(self, value: V) -> Sequence[Any]:
        """Returns the arrays of a value, always as many for values of one kind."""
        return (value,)

    def filled(self, value: V, arrays: Sequence[Any]) -> V:
        """Returns a value like this one with other arrays."""
        (array,) = arrays
        return array

    def literal(self, literal: jex_core.Literal) -> V:
        """Returns a literal of a jaxpr as a value, in the dtype that it was traced with."""
        dtype = getattr(literal.aval, "dtype", None)
        return self.constant(literal.val if dtype is None else np.asarray(literal.val, dtype))

    def flat(self, values: Sequence[V]) -> list[Any]:
        """Returns all arrays of some values."""
        return [array for value in values for array in self.arrays(value)]

    def refilled(self, values: Sequence[V], arrays: Sequence[Any]) -> list[V]:
        """Returns values like these with the arrays that `flat` returned of others."""
        rest = iter(arrays)
        return [self.filled(value, [next(rest) for _ in self.arrays(value)]) for value in values]

    # Equations ------------------------------------------------------------------------------------

    def equation(self, equation: Equation, values: list[V]) -> list[V]:
        """Returns the outputs of an equation on some operands; a subclass says how."""
        raise NotImplementedError

    def merge(
        self, equation: Equation, values: Sequence[V], branches: Sequence[Any] = ()
    ) -> Sequence[V | None]:
        """Returns a value like each output of an equation; None leaves it to its program.

        A loop carries values of these kinds from the start, and all branches of a conditional
        return them. Of a conditional, `branches` are the traced bodies.
        """
        return [None for _ in equation.outvars]

    def settled(self, value: V, like: V) -> V:
        """Returns `value` as one of the kind of `like`."""
        return value

    def entering(self, values: Sequence[V]) -> list[V]:
        """Returns values like those of a loop's carry and rows, as they are inside of it."""
        return list(values)

    def inside(self, equation: Equation) -> Self:
        """Returns the interpreter of the programs inside an equation, within the same trace."""
        return self

    def tracing(self, program: Any, role: str) -> Self:
        """Returns the interpreter of a program that is traced by itself, with notes of its own."""
        inner = copy.copy(self)
        inner.notes = {}
        return inner

    def body(self, jaxpr: OpenJaxpr, consts: Sequence[V], args: Sequence[V]) -> list[V]:
        """Returns the outputs of a program that is traced by itself."""
        return self.run(jaxpr, consts, args)

    # The run --------------------------------------------------------------------------------------

    def run(self, jaxpr: OpenJaxpr, consts: Sequence[V], args: Sequence[V]) -> list[V]:
        """Returns the outputs of an open jaxpr."""
        values: dict[Any, V] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )

        def read(atoms: Sequence[Any]) -> list[V]:
            return [
                self.literal(atom) if isinstance(atom, jex_core.Literal) else values[atom]
                for atom in atoms
            ]

        last = _last_reads(jaxpr)
        for i, equation in enumerate(jaxpr.eqns):
            # New equations get the source line, the name stack and the settings of this one.
            info = equation.source_info
            names = self.name_stack_of(equation) or info.name_stack
            stack = source_info_util.current_name_stack() + names
            source = source_info_util.user_context(info.traceback, name_stack=stack)
            with source, equation.ctx.manager:
                outputs = self.step(equation, read(equation.invars))
            values.update(zip(equation.outvars, outputs, strict=True))
            for variable in last.get(i, ()):
                values.pop(variable, None)
        return read(jaxpr.outvars)

    def name_stack_of(self, equation: Equation) -> Any:
        """Returns the name stack of the equations that take the place of one."""
        return equation.source_info.name_stack

    def step(self, equation: Equation, values: list[V]) -> list[V]:
        """Evaluates one equation of a program; a subclass may do something before and after."""
        return self.equation(equation, values)


def run_at_once(jaxpr: Any) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function that runs outside of jit, operation by operation.

    Functions with derivative rules of their own are compiled as a whole.
    """
    body, consts = opened(jaxpr)
    last = _last_reads(body)
    steps = [(equation, *_calls(equation), last.get(i, ())) for i, equation in enumerate(body.eqns)]

    def run(*arrays: Any) -> list[Any]:
        is_derived = any(isinstance(array, jax.core.Tracer) for array in arrays)
        values: dict[Any, Any] = dict(
            zip((*body.constvars, *body.invars), (*consts, *arrays), strict=True)
        )

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex_core.Literal) else values[atom]

        for equation, call, derived, unread in steps:
            with equation.ctx.manager:
                results = (derived if is_derived else call)(*map(read, equation.invars))
            values.update(zip(equation.outvars, results, strict=True))
            for variable in unread:
                values.pop(variable, None)
        return [read(atom) for atom in body.outvars]

    return run


def _calls(equation: Equation) -> tuple[_Operation, _Operation]:
    """Returns an equation as a function of arrays, and of tracers of a derivative, whose rule JAX
    runs operation by operation as well.
    """

    def bound(*operands: Any) -> list[Any]:
        return bind(equation, operands)

    primitive = equation.primitive
    if primitive.name.startswith("custom_"):  # `bind` makes its functions anew
        compiled = jax.jit(bound)
        return compiled, compiled
    if primitive.name in _COMPILED:
        return _compiled(primitive, **equation.params), bound
    return bound, bound


@functools.lru_cache(4096, typed=True)
def _compiled(primitive: Any, **params: Any) -> _Operation:
    """Returns the program that JAX runs for a primitive outside of jit.

    Calling it costs half of what `Primitive.bind` costs.
    """

    def call(*operands: Any) -> Sequence[Any]:
        results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else (results,)

    call.__name__ = primitive.name
    return jax.jit(call)


def _last_reads(jaxpr: OpenJaxpr) -> dict[int, list[Any]]:
    """Returns the variables that no later equation reads, by equation: their arrays are freed."""
    last: dict[Any, int] = {}
    for i, equation in enumerate(jaxpr.eqns):
        last |= {atom: i for atom in equation.invars if not isinstance(atom, jex_core.Literal)}
    for atom in jaxpr.outvars:
        if not isinstance(atom, jex_core.Literal):
            last.pop(atom, None)
    found: dict[int, list[Any]] = {}
    for variable, i in last.items():
        found.setdefault(i, []).append(variable)
    return found


def readers_of(jaxpr: OpenJaxpr) -> dict[Any, collections.Counter[str]]:
    """Returns the primitives that read each variable, and how often.

    "" stands for the caller of the program.
    """
    readers: dict[Any, collections.Counter[str]] = {}
    reads = [(equation.primitive.name, equation.invars) for equation in jaxpr.eqns]
    for name, atoms in (*reads, ("", jaxpr.outvars)):
        for atom in atoms:
            if not isinstance(atom, jex_core.Literal):
                readers.setdefault(atom, collections.Counter())[name] += 1
    return readers


def equations_of(jaxpr: OpenJaxpr) -> Sequence[Any]:
    """Returns the equations of an open jaxpr itself."""
    return jaxpr.eqns


Handler = Callable[[Any, Any, list[Any]], list[Any]]
"""Evaluates an equation that holds programs: from an interpreter, the equation and its operands."""

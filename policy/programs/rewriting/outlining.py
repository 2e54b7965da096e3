"""Equal parts of a program as calls of one function, so that they are rewritten once.

A model calls the same layers many times, and a trace of it repeats their equations. Parts that
belong to one call of a module are compared by their contents; those that occur more than once
become calls of a jitted function. JAX gives all equations of such a call the call's source line, so
a trace for a report keeps the equations as they are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core

from policy.programs.jaxprs import Equation, bind, is_jaxpr, opened
from policy.programs.rewriting.interpreter import Interpreter
from policy.programs.thread import thread

_NAME = "policy_part"  # of the functions that take the places of parts
_SMALLEST = 8  # equations of a part
_DEEPEST = 12  # names in a row that begin a part


@dataclasses.dataclass(frozen=True)
class _Part:
    """Consecutive equations of one call: an equation to a program, and a program itself.

    Attributes:
      eqns: the equations.
      scopes: the names that they have in common.
      invars: the variables that they read, in the order of their first uses.
      outvars: the variables that other equations read.
      key: equal for parts with the same contents.
    """

    eqns: Sequence[Equation]
    scopes: tuple[Any, ...]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    key: Hashable
    constvars = ()
    ctx = types.SimpleNamespace(manager=contextlib.nullcontext())

    @property
    def source_info(self) -> Any:
        return self.eqns[0].source_info


def outlined(jaxpr: Any) -> Any:
    """Returns a closed jaxpr whose repeated parts are calls, or itself where there are none.

    A trace for a report keeps the source line of each equation, and is returned as it is.
    """
    if thread.keeps_lines or len(jaxpr.eqns) < 2 * _SMALLEST:
        return jaxpr
    body, consts = opened(jaxpr)
    items = _items(body)
    if not any(isinstance(item, _Part) for item in items):
        return jaxpr
    program: Any = types.SimpleNamespace(
        constvars=body.constvars, invars=body.invars, outvars=body.outvars, eqns=items
    )
    outliner = _Outliner()
    return jax.make_jaxpr(lambda *arrays: outliner.run(program, consts, arrays))(
        *(_shape(v.aval) for v in body.invars)
    )


class _Outliner(Interpreter[Any]):
    """Evaluates equations as they are, and parts as calls.

    Attributes:
      calls: a jitted function for each content of parts.
      depth: the number of names that are left out on the stacks of equations.
    """

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.calls: dict[Hashable, Any] = {}
        self.depth = depth

    def equation(self, equation: Any, values: list[Any]) -> list[Any]:
        if not isinstance(equation, _Part):
            return bind(equation, values)
        if equation.key not in self.calls:
            self.calls[equation.key] = jax.jit(_function(equation))
        return self.calls[equation.key](*values)

    def name_stack_of(self, equation: Any) -> Any:
        stack = equation.source_info.name_stack
        names = equation.scopes if isinstance(equation, _Part) else stack.stack[self.depth :]
        return type(stack)(names)


def _function(part: _Part) -> Any:
    body: Any = part  # has what is read of a jaxpr

    def call(*arrays: Any) -> list[Any]:
        return _Outliner(len(part.scopes)).run(body, (), arrays)

    call.__name__ = _NAME
    return call


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jex_core.Literal)


def is_part(equation: Equation) -> bool:
    """Returns whether an equation is a call that `outlined` made."""
    return equation.params.get("name") == _NAME


def _shape(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=aval.sharding,
        manual_axis_type=aval.manual_axis_type,  # inside of a shard_map
    )


# --------------------------------------------------------------------------------------------------
# Parts
# --------------------------------------------------------------------------------------------------


def _items(body: Any) -> list[Equation | _Part]:
    """Returns the equations of a program, with those of repeated parts in their parts."""
    reads = collections.Counter(_variables(body.eqns, body.outvars))
    for depth in range(1, _DEEPEST):
        scopes = functools.partial(_scopes, depth=depth)
        runs = [list(run) for _, run in itertools.groupby(body.eqns, scopes)]
        outlines = [_outline(run, depth) for run in runs]
        alike = collections.Counter(filter(None, outlines))
        parts = [
            _part(run, reads, depth) if alike[outline] > 1 else None
            for run, outline in zip(runs, outlines, strict=True)
        ]
        counts = collections.Counter(part.key for part in parts if part is not None)
        if any(count > 1 for count in counts.values()):
            return [
                item
                for part, run in zip(parts, runs, strict=True)
                for item in ([part] if part is not None and counts[part.key] > 1 else run)
            ]
    return list(body.eqns)


def _scopes(equation: Equation, depth: int) -> tuple[Any, ...]:
    return equation.source_info.name_stack.stack[:depth]


def _outline(run: Sequence[Equation], depth: int) -> tuple[Any, ...]:
    """Returns the primitives of a run of equations, or () if it may be no part."""
    scopes = _scopes(run[0], depth)
    is_named = len(scopes) == depth and all(hasattr(scope, "name") for scope in scopes)
    if len(run) < _SMALLEST or not is_named or any(equation.effects for equation in run):
        return ()
    return tuple(equation.primitive for equation in run)


def _variables(equations: Iterable[Equation], outputs: Iterable[Any] = ()) -> Iterator[Any]:
    """Yields the variables that some equations read, and those among some outputs."""
    atoms = itertools.chain(*(equation.invars for equation in equations), outputs)
    return itertools.filterfalse(_is_literal, atoms)


def _part(run: Sequence[Equation], reads: collections.Counter[Any], depth: int) -> _Part:
    """Returns a run of equations as a part. `reads` counts all reads of the program."""
    made = {variable for equation in run for variable in equation.outvars}
    own = collections.Counter(_variables(run))
    inputs = [variable for variable in own if variable not in made]
    outputs = [v for equation in run for v in equation.outvars if reads[v] > own[v]]
    numbers = {variable: i for i, variable in enumerate(inputs)}
    key = (
        tuple(variable.aval for variable in inputs),
        tuple(_keys(run, numbers, depth)),
        tuple(numbers[v] for v in outputs),
    )
    return _Part(run, _scopes(run[0], depth), inputs, outputs, key)


def _keys(equations: Sequence[Equation], numbers: dict[Any, int], depth: int) -> Iterator[Hashable]:
    for equation in equations:
        for variable in equation.outvars:
            numbers[variable] = len(numbers)
        atoms = tuple(
            (str(atom.val), atom.aval) if _is_literal(atom) else numbers[atom]
            for atom in equation.invars
        )
        yield (
            equation.primitive,
            atoms,
            tuple(variable.aval for variable in equation.outvars),
            str(equation.source_info.name_stack.stack[depth:]),
            tuple((name, _param_key(equation.params[name])) for name in sorted(equation.params)),
            equation.ctx,
        )


def _param_key(value: Any) -> Hashable:
    """Returns a key of an equation's parameter: its contents, or else its identity."""
    if is_jaxpr(value):
        body, consts = opened(value)
        numbers: dict[Any, int] = {}
        for variable in (*body.constvars, *body.invars):
            numbers[variable] = len(numbers)
        return (
            tuple(v.aval for v in (*body.constvars, *body.invars)),
            tuple(map(id, consts)),
            tuple(_keys(body.eqns, numbers, 0)),
            tuple(str(atom.val) if _is_literal(atom) else numbers[atom] for atom in body.outvars),
        )
    if isinstance(value, (tuple, list)):
        return tuple(map(_param_key, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value

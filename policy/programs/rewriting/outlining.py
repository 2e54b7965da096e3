"""Equal parts of a program as calls of one function, so that they are rewritten once.

A model calls the same layers many times, and a trace of it repeats their equations. Parts that
belong to one call of a module are compared by their contents; those that occur more than once
become calls of a jitted function. JAX gives all equations of such a call the call's source line, so
a trace for a report keeps the equations as they are.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex_core

from policy.programs.jaxprs import Equation, is_jaxpr, opened, with_equations
from policy.programs.thread import thread

_NAME = "policy_part"  # of the functions that take the places of parts
_SMALLEST = 8  # equations of a part
_DEEPEST = 12  # names in a row that begin a part


class _Part(NamedTuple):
    """Consecutive equations of one call.

    Attributes:
      eqns: the equations.
      invars: the variables that they read, in the order of their first uses.
      outvars: the variables that other equations read.
      key: equal for parts with the same contents.
    """

    eqns: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    key: Hashable


def outlined(jaxpr: Any) -> Any:
    """Returns a closed jaxpr whose repeated parts are calls, or itself where there are none.

    A trace for a report keeps the source line of each equation, and is returned as it is.
    """
    body: Any = opened(jaxpr)[0]
    if thread.keeps_lines or len(body.eqns) < 2 * _SMALLEST:
        return jaxpr
    equations = _with_calls(body)
    return jaxpr if equations is None else with_equations(jaxpr, equations)


def _call(body: Any, part: _Part, depth: int) -> Any:
    """Returns an equation that calls the contents of a part, without the names in common."""
    equations = [e.replace(source_info=_source(e, slice(depth, None))) for e in part.eqns]
    program = body.replace(constvars=(), invars=part.invars, outvars=part.outvars, eqns=equations)

    def call(*arrays: Any) -> list[Any]:
        return jax.core.eval_jaxpr(program, (), *arrays)

    call.__name__ = _NAME
    shapes = [_shape(variable.aval) for variable in part.invars]
    return opened(jax.make_jaxpr(jax.jit(call))(*shapes))[0].eqns[0]


def _source(equation: Any, names: slice) -> Any:
    """Returns the source of an equation with some of the names on its stack alone."""
    info = equation.source_info
    stack = info.name_stack
    return info.replace(name_stack=type(stack)(stack.stack[names]))


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


def _with_calls(body: Any) -> list[Equation] | None:
    """Returns the equations of a program with calls for its repeated parts; None without any."""
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
            break
    else:
        return None
    calls: dict[Hashable, Any] = {}
    equations: list[Any] = []
    for part, run in zip(parts, runs, strict=True):
        if part is None or counts[part.key] < 2:
            equations += run
            continue
        if part.key not in calls:
            calls[part.key] = _call(body, part, depth)
        variables = {"invars": list(part.invars), "outvars": list(part.outvars)}
        source = _source(run[0], slice(depth))
        equations.append(calls[part.key].replace(source_info=source, **variables))
    return equations


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
    return _Part(run, inputs, outputs, key)


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

"""Equations that hold programs, rebuilt: an interpreter runs their programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import jax
import jax.extend.core as jex_core
from jax import lax
from jax.sharding import PartitionSpec

from policy.programs.jaxprs import (
    Equation,
    Role,
    Subprogram,
    bind,
    opened,
    subprogram,
    subprograms,
    with_consts_as_arguments,
    with_subprograms,
)
from policy.programs.primitives import INLINED, REMATS
from policy.programs.rewriting.interpreter import Handler, Interpreter, Notes, V


class Body(Generic[V]):
    """A program inside an equation, as a function of arrays that returns arrays, and notes.

    Attributes:
      outputs: a value like each output, with abstract values for arrays, after the function was
        traced.
    """

    def __init__(
        self, run: Interpreter[V], program: Any, inputs: Sequence[V], like: Sequence[V | None] = ()
    ):
        """Takes a subprogram of an equation, or a closed jaxpr.

        Outputs settle on the kinds of `like`, where that has a value for them.
        """
        self.interpreter, self.inputs, self.like = run, list(inputs), list(like)
        is_inside = isinstance(program, Subprogram)
        self.jaxpr, self.consts = opened(program.jaxpr if is_inside else program)
        self.role: Role = program.role if is_inside else "call"
        self.outputs: list[V] = []

    def __call__(self, *arrays: Any) -> tuple[list[Any], Notes]:
        inner = self.interpreter.tracing(self, self.role)
        consts = [inner.constant(const) for const in self.consts]
        outputs = inner.body(self.jaxpr, consts, inner.refilled(self.inputs, arrays))
        outputs[: len(self.like)] = settled(inner, outputs, self.like)
        self.outputs = [
            inner.filled(value, list(map(jax.typeof, inner.arrays(value)))) for value in outputs
        ]
        return inner.flat(outputs), inner.notes

    def arrays(self, *arrays: Any) -> list[Any]:
        """Returns the outputs of a body without notes."""
        return self(*arrays)[0]


def settled(run: Interpreter[V], values: Sequence[V], like: Sequence[V | None]) -> list[V]:
    """Returns as many values as `like` has, of its kinds where it has one."""
    pairs = zip(values, like, strict=False)
    return [value if one is None else run.settled(value, one) for value, one in pairs]


class _Staged(Generic[V]):
    """A body that is traced once, where loops and conditionals would trace it again.

    Attributes:
      jaxpr: its program.
      outputs: those of the body.
      notes: shapes of the notes of the body.
    """

    def __init__(self, body: Body[V], arrays: Sequence[Any]):
        self.jaxpr, shapes = jax.make_jaxpr(body, return_shape=True)(*arrays)
        self.outputs, self.notes = body.outputs, shapes[1]
        self._structure = jax.tree.structure(shapes)

    def __call__(self, *arrays: Any) -> tuple[list[Any], Notes]:
        return self.returned(jex_core.jaxpr_as_fun(self.jaxpr)(*arrays))

    def returned(self, results: Sequence[Any]) -> tuple[list[Any], Notes]:
        """Returns the results of its program as outputs and notes."""
        return jax.tree.unflatten(self._structure, results)


def _like(
    run: Interpreter[V], like: Sequence[V | None], outputs: Sequence[V], arrays: Sequence[Any]
) -> list[V]:
    """Returns results of the kinds of `like`, or else like the outputs of the program."""
    kinds = [output if one is None else one for one, output in zip(like, outputs, strict=True)]
    return run.refilled(kinds, arrays)


def call(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Inlines a program that is called once."""
    program = subprogram(equation, "call")
    inner = run.inside(equation)
    return inner.run(program.body, [inner.constant(const) for const in program.consts], values)


def jit(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a jit with its shardings, donated operands and compiler options.

    Each value should be one array of the shape that the operand was traced with.
    """
    return _bound(run, equation, "call", values, lambda closed: (closed, []))


def remat(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a checkpoint by binding the same primitive.

    This keeps its policy, whether it was differentiated already, and its recomputations apart from
    the forward pass.
    """
    return _bound(run, equation, "remat", values, with_consts_as_arguments)


def _bound(
    run: Interpreter[V],
    equation: Equation,
    role: Role,
    values: list[V],
    as_bound: Callable[[Any], tuple[Any, list[Any]]],
) -> list[V]:
    program, arrays = subprogram(equation, role), run.flat(values)
    body = Body(run.inside(equation), program, values, run.merge(equation, values))
    staged = _Staged(body, arrays)
    jaxpr, consts = as_bound(staged.jaxpr)
    results = bind(equation, [*consts, *arrays], with_subprograms(equation, [jaxpr]))
    outputs, notes = staged.returned(results)
    run.notes.update(notes)
    return run.refilled(body.outputs, outputs)


def scan(
    run: Interpreter[V], equation: Equation, values: list[V], carried: Sequence[V] = ()
) -> list[V]:
    """Rebuilds a scan. Notes of its body are stacked along a new first axis.

    Args:
      carried: a value like each carry, where `run.merge` is not to be asked.
    """
    params, program = equation.params, subprogram(equation, "loop")
    given, inner = program.given(values), run.inside(equation)
    fixed, xs = given[program.fixed], given[program.rows]
    like = [*carried, *run.merge(equation, values)[len(carried) :]]
    init = settled(run, given[program.carry], like[: program.carried])
    body = Body(inner, program, [*fixed, *inner.entering([*init, *xs])], like)
    width, rows = len(run.flat(init)), run.flat(xs)
    scanned = [array for array in rows if array.ndim]  # a number beside an array has no rows

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
        steps = iter(xs)
        row = [next(steps) if array.ndim else array for array in rows]
        outputs, notes = body(*run.flat(fixed), *carry, *row)
        return outputs[:width], (outputs[width:], notes)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    split = params.get("_split_transpose", False)
    after, (ys, notes) = lax.scan(step, run.flat(init), scanned, **options, _split_transpose=split)
    run.notes.update(notes)
    return _like(run, like, body.outputs, [*after, *ys])


def while_loop(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a while. Notes of its body are the largest of all steps."""
    test, program = subprogram(equation, "cond"), subprogram(equation, "loop")
    inner, given = run.inside(equation), program.given(values)
    tested, fixed = test.given(values)[test.fixed], given[program.fixed]
    like = run.merge(equation, values)
    init = settled(run, given[program.carry], like)
    entering = inner.entering(init)
    cond = Body(inner, test, [*tested, *entering])
    steps = Body(inner, program, [*fixed, *entering], like)
    body = _Staged(steps, [*run.flat(fixed), *run.flat(init)])
    zeros = _zeros(body.notes)

    def step(state: tuple[list[Any], Notes]) -> tuple[list[Any], Notes]:
        outputs, notes = body(*run.flat(fixed), *state[0])
        return outputs, {key: jax.numpy.maximum(state[1][key], note) for key, note in notes.items()}

    def goes_on(state: tuple[list[Any], Notes]) -> Any:
        return cond(*run.flat(tested), *state[0])[0][0]

    after, notes = lax.while_loop(goes_on, step, (run.flat(init), zeros))
    run.notes.update(notes)
    return _like(run, like, body.outputs, after)


def cond(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a conditional. Notes of a branch that was not taken are zero."""
    inner, operands = run.inside(equation), values[1:]
    arrays = run.flat(operands)
    branches = [_Staged(Body(inner, one, operands), arrays) for one in subprograms(equation)]
    like = run.merge(equation, values, branches)
    shapes = {key: shape for branch in branches for key, shape in branch.notes.items()}

    def merged(branch: _Staged[V]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            outputs, notes = branch(*arrays)
            results = settled(inner, inner.refilled(branch.outputs, outputs), like)
            absent = {key: shape for key, shape in shapes.items() if key not in notes}
            return inner.flat(results), notes | _zeros(absent)

        return call

    which = run.flat(values[:1])[0]
    outputs, notes = lax.switch(which, list(map(merged, branches)), *arrays)
    run.notes.update(notes)
    return _like(run, like, branches[0].outputs, outputs)


def _zeros(notes: Mapping[int, Any]) -> Notes:
    return {key: jax.numpy.zeros(shape.shape, shape.dtype) for key, shape in notes.items()}


def shard_map(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a `shard_map`. Notes should be the same on every device."""
    params = equation.params
    like = run.merge(equation, values)
    body = Body(run.inside(equation), subprogram(equation, "shard"), values, like)
    in_specs = [
        spec if array.ndim else PartitionSpec()
        for value, spec in zip(values, params["in_specs"], strict=True)
        for array in run.arrays(value)
    ]
    counts = [1 if one is None else len(run.arrays(one)) for one in like]
    out_specs = [
        spec for count, spec in zip(counts, params["out_specs"], strict=True) for _ in range(count)
    ]
    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=(out_specs, PartitionSpec()),
        check_vma=params["check_vma"],
        axis_names=frozenset(manual_axes(equation)),
    )
    arrays, notes = mapped(*run.flat(values))
    run.notes.update(notes)
    return run.refilled(body.outputs, arrays)


def manual_axes(equation: Equation) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices run a `shard_map`'s program each on its own."""
    params = equation.params
    return tuple(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"])


def has_options(equation: Equation) -> bool:
    """Returns whether a jit gives shardings, donates operands, or sets options of the compiler."""
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return (
        any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
        or any(params.get("donated_invars", ()))
        or bool(params.get("compiler_options_kvs"))
    )


def is_for_platforms(equation: Equation) -> bool:
    """Returns whether an equation holds a branch for each platform, chosen when it is lowered."""
    return equation.params.get("branches_platforms") is not None


CONTROL_FLOW: Mapping[str, Handler] = {
    **dict.fromkeys(sorted(INLINED), call),
    **dict.fromkeys(REMATS, remat),
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": shard_map,
}
"""The function that rebuilds each primitive, where nothing is differentiated any more."""


def handler_of(equation: Equation) -> Handler | None:
    """Returns the function that rebuilds an equation.

    Returns None for branches by platform, and for primitives without such a function.
    """
    return None if is_for_platforms(equation) else CONTROL_FLOW.get(equation.primitive.name)

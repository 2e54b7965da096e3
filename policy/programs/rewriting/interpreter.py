"""Interpreter of jaxprs: evaluates a program on values of another kind than arrays.

Equations that hold programs are rebuilt: the interpreter runs their programs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.sharding import PartitionSpec

from policy.programs import primitives
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    Subprogram,
    bind,
    opened,
    subprogram,
    subprograms,
    with_consts_as_arguments,
    with_subprograms,
)

V = TypeVar("V")
Notes = dict[int, Any]
_Operation = Callable[..., Sequence[Any]]

_COMPILED = primitives.ELEMENTWISE | primitives.MATMULS | primitives.CASTS
_COMPILED |= primitives.RESHAPES | primitives.BROADCASTS


class Interpreter(Generic[V]):
    """Evaluates jaxprs on values of type `V`, which hold arrays and further facts.

    A subclass says how an equation is evaluated (`equation`); where values are no arrays, how they
    hold some (`constant`, `arrays`, `filled`), and on which kinds of values loops and branches
    settle (`merge`, `settled`). Equations that hold programs are rebuilt by the functions below.

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

    def tracing(self, program: Any) -> Self:
        """Returns the interpreter of a program that is traced by itself, with notes of its own."""
        inner = copy.copy(self)
        inner.notes = {}
        return inner

    def note_spec(self, equation: Equation) -> PartitionSpec:
        """Returns the layout of the notes of a `shard_map`: the same on every device."""
        return PartitionSpec()

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

        last = _last_reads(jaxpr.eqns, jaxpr.outvars)
        for i, equation in enumerate(jaxpr.eqns):
            # New equations get the source line, the name stack and the settings of this one.
            info = equation.source_info
            names = self.name_stack_of(equation)
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
    live = _live(body)
    last = _last_reads(live, body.outvars)
    steps = [(equation, *_calls(equation), last.get(i, ())) for i, equation in enumerate(live)]

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


def _live(jaxpr: OpenJaxpr) -> list[Equation]:
    """Returns the equations that the outputs of a program depend on, and those with effects."""
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, jex_core.Literal)}
    live = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not read.isdisjoint(equation.outvars):
            live.append(equation)
            read |= {atom for atom in equation.invars if not isinstance(atom, jex_core.Literal)}
    return live[::-1]


def _last_reads(equations: Sequence[Any], outputs: Sequence[Any]) -> dict[int, list[Any]]:
    """Returns the variables that no later equation reads, by equation: their arrays are freed."""
    last: dict[Any, int] = {}
    for i, equation in enumerate(equations):
        last |= {atom: i for atom in equation.invars if not isinstance(atom, jex_core.Literal)}
    for atom in outputs:
        if not isinstance(atom, jex_core.Literal):
            last.pop(atom, None)
    found: dict[int, list[Any]] = {}
    for variable, i in last.items():
        found.setdefault(i, []).append(variable)
    return found


# --------------------------------------------------------------------------------------------------
# Equations that hold programs
# --------------------------------------------------------------------------------------------------


Handler = Callable[[Any, Any, list[Any]], list[Any]]
"""Evaluates an equation that holds programs: from an interpreter, the equation and its operands."""


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
        self.outputs: list[V] = []

    def __call__(self, *arrays: Any) -> tuple[list[Any], Notes]:
        inner = self.interpreter.tracing(self)
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

    Args:
      body: the body.
      arrays: its arguments, or their shapes.

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


def rebound(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a jit or a checkpoint by binding the same primitive.

    This keeps the shardings, donated operands and compiler options of a jit, each value of which
    should be one array of the shape that the operand was traced with. It keeps a checkpoint's
    policy, whether it was differentiated already, and its recomputations apart from the forward
    pass.
    """
    (program,), arrays = subprograms(equation), run.flat(values)
    body = Body(run.inside(equation), program, values, run.merge(equation, values))
    staged = _Staged(body, arrays)
    jaxpr = staged.jaxpr
    if program.role == "remat":
        jaxpr, consts = with_consts_as_arguments(jaxpr)
        arrays = [*consts, *arrays]
    outputs, notes = staged.returned(bind(equation, arrays, with_subprograms(equation, [jaxpr])))
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

    def goes_on(carry: list[Any]) -> Any:
        return cond(*run.flat(tested), *carry)[0][0]

    def step(state: tuple[list[Any], Notes]) -> tuple[list[Any], Notes]:
        carry, before = state
        outputs, notes = body(*run.flat(fixed), *carry)
        if test.body.outvars[0].aval.shape:  # of a vmap: a loop for each row, until all are done
            outputs = list(map(functools.partial(_selected, goes_on(carry)), outputs, carry))
        return outputs, {key: jax.numpy.maximum(before[key], note) for key, note in notes.items()}

    def any_goes_on(state: tuple[list[Any], Notes]) -> Any:
        rows = goes_on(state[0])
        return rows.any() if rows.ndim else rows

    after, notes = lax.while_loop(any_goes_on, step, (run.flat(init), zeros))
    run.notes.update(notes)
    return _like(run, like, body.outputs, after)


def _selected(goes_on: Any, after: Any, before: Any) -> Any:
    """Returns `after` in the rows that go on. `goes_on` has the leading axes of both."""
    rows = lax.broadcast_in_dim(goes_on, after.shape, range(goes_on.ndim))
    return lax.select(rows, after, before)


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
    if is_for_platforms(equation):  # the others can't be lowered for this one
        outputs, notes = _platform_switch(equation, which, list(map(merged, branches)), arrays)
    else:
        outputs, notes = lax.switch(which, list(map(merged, branches)), *arrays)
    run.notes.update(notes)
    return _like(run, like, branches[0].outputs, outputs)


def _platform_switch(
    equation: Equation, which: Any, branches: Sequence[Callable[..., Any]], arrays: Sequence[Any]
) -> Any:
    """Returns the result of the branch for the platform that the program is lowered for."""
    traced = [jax.make_jaxpr(branch, return_shape=True)(*arrays) for branch in branches]
    params = with_subprograms(equation, [jaxpr for jaxpr, _ in traced])
    results = bind(equation, [which, *arrays], params)
    return jax.tree.unflatten(jax.tree.structure(traced[0][1]), results)


def _zeros(notes: Mapping[int, Any]) -> Notes:
    return {key: jax.numpy.zeros(shape.shape, shape.dtype) for key, shape in notes.items()}


def shard_map(run: Interpreter[V], equation: Equation, values: list[V]) -> list[V]:
    """Rebuilds a `shard_map`, with notes as `Interpreter.note_spec` says."""
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
        out_specs=(out_specs, run.note_spec(equation)),
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
    **dict.fromkeys(sorted(primitives.INLINED), call),
    **dict.fromkeys(primitives.REMATS, rebound),
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

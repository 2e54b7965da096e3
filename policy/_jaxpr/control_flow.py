"""The primitives that hold programs: made again through JAX's public functions, their programs run by a `Rerun`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex_core
from jax import lax
from jax.sharding import PartitionSpec

from policy._jaxpr.interpreter import HANDLERS, Handler, Notes, Rerun, Value, filled, flat
from policy._jaxpr.primitives import INLINED, REMATS
from policy._jaxpr.subprograms import bind, opened, scan_arity, with_consts_as_arguments


class Body:
    """A program inside an equation, as a function of arrays that returns arrays, and notes.

    Attributes:
      outputs: the values returned, after the function was traced.
    """

    def __init__(
        self,
        run: Rerun,
        jaxpr: Any,
        inputs: Sequence[Value],
        like: Sequence[Value | None] = (),
        reads: Literal["open", "checkpoint", "closed"] = "open",
    ):
        """Outputs are settled to be of the kind of `like`, where that has a value for them.

        `reads`: whether it may read values of the program around it that are none of its inputs: a checkpoint rather
        computes them again, and what each device runs for itself has none of them.
        """
        self.reads: Literal["open", "checkpoint", "closed"] = reads
        self.runner, self.inputs, self.like = run, list(inputs), like
        self.jaxpr, self.consts = opened(jaxpr)
        self.outputs: list[Value] = []

    def __call__(self, *arrays: Any) -> tuple[list[Any], Notes]:
        inner = self.runner.copied().standing_in(self.runner)
        inner.bodies = (*self.runner.bodies, self)
        inner.lane = inner.lane and inner.lane.within(self.reads)
        inputs = inner.into(filled(self.inputs, arrays))
        outputs = inner.run(self.jaxpr, [Value([const]) for const in self.consts], inputs)
        inner.finished(outputs, self.jaxpr.outvars)
        for i, like in enumerate(self.like):
            if like is not None:
                outputs[i] = inner.settled(outputs[i], like)
        self.outputs = outputs
        return flat(outputs), inner.notes


def _staged(body: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Callable[..., Any]]:
    """Returns the results of a function, and the function, traced once: loops and conditionals would trace it again."""
    jaxpr, shape = jax.make_jaxpr(body, return_shape=True)(*arrays)
    structure = jax.tree.structure(shape)
    call = jex_core.jaxpr_as_fun(jaxpr)
    return shape, lambda *arrays: jax.tree.unflatten(structure, call(*arrays))


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


@_handles(*INLINED)
def _call(run: Rerun, equation: Any, values: list[Value]) -> list[Value]:
    params = equation.params
    program = next(
        params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if params.get(name) is not None
    )
    body, consts = opened(program)
    return run.inside(equation).run(body, [Value([const]) for const in consts], values)


@_handles(*REMATS)
def _remat(run: Rerun, equation: Any, values: list[Value]) -> list[Value]:
    """The same primitive, so that what it computes again is not merged with what was computed before."""
    body = Body(run.inside(equation), equation.params["jaxpr"], values, reads="checkpoint")
    closed, shape = jax.make_jaxpr(body, return_shape=True)(*flat(values))
    jaxpr, consts = with_consts_as_arguments(closed)
    results = bind(equation, [*consts, *flat(values)], {**equation.params, "jaxpr": jaxpr})
    arrays, notes = jax.tree.unflatten(jax.tree.structure(shape), results)
    run.notes.update(notes)
    return filled(body.outputs, arrays)


@_handles("scan")
def _scan(run: Rerun, equation: Any, values: list[Value]) -> list[Value]:
    """Runs a scan. Measurements of its body are stacked: each has one more axis, of the length of the scan."""
    params, (consts, carried) = equation.params, scan_arity(equation)
    fixed = values[:consts]
    init = run.carried(equation, values, range(consts, consts + carried))
    xs, inner = values[consts + carried :], run.inside(equation)
    inside = [*fixed, *inner.entering([*init, *xs])]
    like = run.kinds(equation, values)
    body = Body(inner, params["jaxpr"], inside, like)
    width, given = len(flat(init)), flat(xs)
    scanned = [array for array in given if array.ndim]  # what stands beside a value, a number for all of it, is not

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
        steps = iter(xs)
        outputs, notes = body(*flat(fixed), *carry, *(next(steps) if array.ndim else array for array in given))
        return outputs[:width], (outputs[width:], notes)

    options = {"reverse": params["reverse"], "unroll": params["unroll"], "length": params["length"]}
    after, (ys, notes) = lax.scan(step, flat(init), scanned, **options)
    run.notes.update(notes)
    return filled(like, [*after, *ys])


@_handles("while")
def _while(run: Rerun, equation: Any, values: list[Value]) -> list[Value]:
    """Runs a loop. Measurements of its body are the largest of all steps."""
    params, inner = equation.params, run.inside(equation)
    n, m = params["cond_nconsts"], params["body_nconsts"]
    init = run.carried(equation, values, range(n + m, len(values)))
    entering = inner.entering(init)
    cond = Body(inner, params["cond_jaxpr"], [*values[:n], *entering])
    body = Body(inner, params["body_jaxpr"], [*values[n : n + m], *entering], init)
    (_, shapes), call = _staged(body, [*flat(values[n : n + m]), *flat(init)])
    zeros = {key: jax.numpy.zeros(shape.shape, shape.dtype) for key, shape in shapes.items()}

    def step(state: tuple[list[Any], Notes]) -> tuple[list[Any], Notes]:
        outputs, notes = call(*flat(values[n : n + m]), *state[0])
        return outputs, {key: jax.numpy.maximum(state[1][key], note) for key, note in notes.items()}

    after, notes = lax.while_loop(lambda state: cond(*flat(values[:n]), *state[0])[0][0], step, (flat(init), zeros))
    run.notes.update(notes)
    return filled(run.kinds(equation, values), after)


@_handles("cond")
def _cond(run: Rerun, equation: Any, values: list[Value]) -> list[Value]:
    """Runs a conditional. Measurements of a branch that was not taken are zero."""
    inner, operands = run.inside(equation), values[1:]
    branches = equation.params["branches"]
    like = run.kinds(equation, values)
    staged = [_staged(Body(inner, branch, operands, like), flat(operands)) for branch in branches]
    shapes = {key: shape for (_, notes), _ in staged for key, shape in notes.items()}

    def padded(call: Callable[..., Any]) -> Callable[..., Any]:
        def branch(*arrays: Any) -> Any:
            outputs, notes = call(*arrays)
            zeros = {key: jax.numpy.zeros(s.shape, s.dtype) for key, s in shapes.items() if key not in notes}
            return outputs, notes | zeros

        return branch

    outputs, notes = lax.switch(values[0].arrays[0], [padded(call) for _, call in staged], *flat(operands))
    run.notes.update(notes)
    return filled(like, outputs)


@_handles("shard_map")
def _shard_map(run: Rerun, equation: Any, values: list[Value]) -> list[Value]:
    """Runs a `shard_map`. Measurements are the same on every device: see `Rerun.axes`."""
    params, inner = equation.params, run.inside(equation)
    axes = tuple(params.get("newly_manual_axes", params.get("manual_axes")))
    inner.axes = (*run.axes, *axes)
    like = run.kinds(equation, values)
    body = Body(inner, params["jaxpr"], values, like, reads="closed")
    specs = zip(values, params["in_specs"], strict=True)
    in_specs = [spec if array.ndim else PartitionSpec() for value, spec in specs for array in value.arrays]
    out_specs = [spec for value, spec in zip(like, params["out_specs"], strict=True) for _ in value.arrays]
    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=(out_specs, PartitionSpec()),
        check_vma=params["check_vma"],
        axis_names=frozenset(axes),
    )
    arrays, notes = mapped(*flat(values))
    run.notes.update(notes)
    return filled(body.outputs, arrays)

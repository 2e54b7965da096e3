"""The primitives that hold programs: each is made again through JAX's public functions, its programs rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax

from policy._jaxpr.paths import scanned_path
from policy._jaxpr.primitives import CALLS, MATMULS, REMATS
from policy._jaxpr.subprograms import bind, opened, scan_arity, with_consts_as_arguments
from policy._jaxpr.walk import walk
from policy.autocast.evaluator import HANDLERS, Evaluator, Handler, as_traced, opaque_kind
from policy.autocast.memoization import once_for_all_alike
from policy.autocast.settings import UnknownPrimitiveError
from policy.autocast.values import F32, Value, cast, float_dtype


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Body:
    """A program inside an equation, as a function of arrays.

    Attributes:
      like: what is known of each output, after the function was traced.
    """

    def __init__(self, evaluator: Evaluator, jaxpr: Any, inputs: Sequence[Value], out: Sequence[Any] | None = None):
        """`out` holds the dtypes to return floating outputs in; None leaves each as it was computed."""
        self.evaluator, self.inputs, self.out = evaluator, list(inputs), out
        self.jaxpr, self.consts = opened(jaxpr)
        self.like: list[Value] = []

    def __call__(self, *arrays: Any) -> list[Any]:
        inputs = [
            Value(array, like.yields, like.constant, like.narrows)
            for array, like in zip(arrays, self.inputs, strict=True)
        ]
        outputs = self.evaluator.run(self.jaxpr, [Value(const) for const in self.consts], inputs)
        arrays_out = [output.array for output in outputs]
        if self.out is not None:
            arrays_out = [
                array if dtype is None else cast(array, dtype)
                for array, dtype in zip(arrays_out, self.out, strict=True)
            ]
        self.like = [
            Value(jax.typeof(array), o.yields, o.constant, o.narrows)  # no array: it is a tracer of this call's
            for array, o in zip(arrays_out, outputs, strict=True)
        ]
        return arrays_out

    def results(self, arrays: Sequence[Any]) -> list[Value]:
        """The outputs of a call of this function, with what is known of them."""
        return [Value(a, like.yields, like.constant, like.narrows) for a, like in zip(arrays, self.like, strict=True)]


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _dtypes(atoms: Sequence[Any]) -> list[Any]:
    return [float_dtype(atom.aval) for atom in atoms]


@_handles("jit")
def _jit(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """Inlined, unless it says where its arrays lie, or what becomes of them."""
    params, inside = equation.params, evaluator.inside(equation)
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    placed = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    if not (placed or any(params.get("donated_invars", ())) or params.get("compiler_options_kvs")):
        body, consts = opened(params["jaxpr"])
        return inside.run(body, [Value(const) for const in consts], values)
    arrays = as_traced(equation.invars, values)
    like = [Value(array, value.yields, value.constant) for array, value in zip(arrays, values, strict=True)]
    body = Body(inside, params["jaxpr"], like, _dtypes(equation.outvars))
    return [Value(array) for array in bind(equation, arrays, {**params, "jaxpr": jax.make_jaxpr(body)(*arrays)})]


@_handles(*CALLS)
def _call(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    body, consts = opened(equation.params.get("jaxpr") or equation.params["call_jaxpr"])
    return evaluator.inside(equation).run(body, [Value(const) for const in consts], values)


@_handles(*REMATS)
@once_for_all_alike
def _remat(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """The same primitive with its policy and whether it was differentiated already: jax.checkpoint would lose that."""
    body = Body(evaluator.inside(equation), equation.params["jaxpr"], values)
    jaxpr, consts = with_consts_as_arguments(jax.make_jaxpr(body)(*_arrays(values)))
    return body.results(bind(equation, [*consts, *_arrays(values)], {**equation.params, "jaxpr": jaxpr}))


@_handles("scan")
def _scan(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """Runs a scan whose carries keep their dtypes: a narrowed accumulator of 4096 steps is 76% off.

    Scanned layers are the exception: where a rule for their path has a half output_dtype, each layer passes its carry
    to the next in that.
    """
    params, (consts, carried) = equation.params, scan_arity(equation)
    carry = values[consts : consts + carried]
    others = evaluator.entering(equation, [*values[:consts], *values[consts + carried :]])
    fixed, xs = others[:consts], others[consts:]
    init = as_traced(equation.invars[consts : consts + carried], carry)
    out = _handed_on(evaluator, equation, fixed, init, xs)
    init = [a if dtype is None else cast(a, dtype) for a, dtype in zip(init, out, strict=True)]
    inputs = [*fixed, *map(Value, init), *xs]
    body = Body(evaluator.inside(equation), params["jaxpr"], inputs)

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = body(*_arrays(fixed), *carry, *xs)
        after = [a if dtype is None else cast(a, dtype) for a, dtype in zip(outputs[:carried], out, strict=True)]
        return after, outputs[carried:]

    after, ys = lax.scan(
        step,
        init,
        _arrays(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    return [*map(Value, after), *body.results([*after, *ys])[carried:]]


def _handed_on(evaluator: Evaluator, equation: Any, fixed: list[Value], init: list[Any], xs: list[Value]) -> list[Any]:
    """The dtype of each carry: half where a rule says so, and a step that gets half returns half by itself."""
    carried = len(init)
    traced = _dtypes(equation.outvars[:carried])
    body, _ = opened(equation.params["jaxpr"])
    above = evaluator.path_of(equation)
    layer = scanned_path(body, above)
    half = evaluator.places.output_of(layer) if layer != above else None
    if evaluator.settings.narrows_scans and _has_layers(body, xs):
        compute = evaluator.places[above].compute
        half = compute if compute.itemsize < F32.itemsize else half
    if half is None or not equation.params["length"]:
        return traced
    inside = evaluator.inside(equation, reports=False)
    out = [half if dtype == F32 and np.ndim(array) else dtype for dtype, array in zip(traced, init, strict=True)]

    def step(fixed_arrays: list[Any], init: list[Any], xs_arrays: list[Any]) -> list[Any]:
        carry = [a if dtype is None else cast(a, dtype) for a, dtype in zip(init, out, strict=True)]
        rows = [lax.index_in_dim(array, 0, keepdims=False) for array in xs_arrays]
        like = [*fixed, *map(Value, carry), *(Value(row, x.yields) for row, x in zip(rows, xs, strict=True))]
        return Body(inside, equation.params["jaxpr"], like)(*fixed_arrays, *carry, *rows)[:carried]

    while True:
        found = jax.eval_shape(step, _arrays(fixed), init, _arrays(xs))
        stable = [t if d == half != o.dtype else d for d, o, t in zip(out, found, traced, strict=True)]
        if stable == out:
            return out
        out = stable


def _has_layers(body: Any, xs: Sequence[Value]) -> bool:
    """Returns whether each step multiplies, and has weights of its own: rows of parameters alone may be summed up."""
    has_weights = any(x.yields and np.ndim(x.array) > 2 for x in xs)
    return has_weights and any(site.name in MATMULS for site in walk(body))


@_handles("while")
def _while(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    params, inside = equation.params, evaluator.inside(equation)
    n, m = params["cond_nconsts"], params["body_nconsts"]
    conds, bodies = values[:n], values[n : n + m]
    init = as_traced(equation.invars[n + m :], values[n + m :])
    carry = list(map(Value, init))
    cond = Body(inside, params["cond_jaxpr"], [*conds, *carry])
    body = Body(inside, params["body_jaxpr"], [*bodies, *carry], _dtypes(equation.outvars))
    outputs = lax.while_loop(
        lambda carry: cond(*_arrays(conds), *carry)[0], lambda carry: body(*_arrays(bodies), *carry), init
    )
    return [Value(output) for output in outputs]


@_handles("cond")
def _cond(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """An output is half where every branch makes it half, else as it was traced."""
    params, inside = equation.params, evaluator.inside(equation)
    if params.get("branches_platforms") is not None:  # what the platforms' branches return must be alike
        return _platforms(inside, equation, as_traced(equation.invars, values))
    index, operands = values[0].array, values[1:]
    bodies = [Body(inside, branch, operands) for branch in params["branches"]]
    # Each is traced once: twice would be four times where conditionals are nested, and eight times one level further.
    programs = [jax.make_jaxpr(body)(*_arrays(operands)) for body in bodies]
    halves = [{like.dtype for like in outputs} for outputs in zip(*(body.like for body in bodies), strict=True)]
    out = [
        None if dtype is None else next(iter(found)) if len(found) == 1 else dtype
        for dtype, found in zip(_dtypes(equation.outvars), halves, strict=True)
    ]
    branches = [functools.partial(_evaluated, program, out) for program in programs]
    outputs = lax.switch(index, branches, *_arrays(operands))
    narrows = [any(body.like[i].narrows for body in bodies) for i in range(len(out))]
    return [Value(output, narrows=narrow) for output, narrow in zip(outputs, narrows, strict=True)]


def _evaluated(program: Any, out: Sequence[Any], *arrays: Any) -> list[Any]:
    """The outputs of a traced program, cast to the dtypes in `out` where that has one."""
    outputs = jex_core.jaxpr_as_fun(program)(*arrays)
    return [output if dtype is None else cast(output, dtype) for output, dtype in zip(outputs, out, strict=True)]


def _platforms(inside: Evaluator, equation: Any, arrays: list[Any]) -> list[Value]:
    """The same primitive, as only it knows which platforms its branches are for."""
    operands, out = arrays[1:], _dtypes(equation.outvars)
    if not any(_may_narrow(inside, branch) for branch in equation.params["branches"]):
        return [Value(output) for output in bind(equation, arrays)]
    branches = [Body(inside, branch, list(map(Value, operands)), out) for branch in equation.params["branches"]]
    rewritten = tuple(jax.make_jaxpr(branch)(*operands) for branch in branches)
    return [Value(output) for output in bind(equation, arrays, {**equation.params, "branches": rewritten})]


def _may_narrow(evaluator: Evaluator, program: Any) -> bool:
    """Returns whether a program whose operands have their traced dtypes has to be rewritten, or reported."""
    settings = evaluator.settings
    names = MATMULS | settings.allow
    return settings.strict or evaluator.report is not None or any(site.name in names for site in walk(program))


@_handles("shard_map")
def _shard_map(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    params = equation.params
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    body = Body(evaluator.inside(equation), params["jaxpr"], values)
    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=frozenset(axes),
    )
    return body.results(mapped(*_arrays(values)))


# ---------------------------------------------------------------------------------------------------------------------
# Functions with a derivative rule of their own
# ---------------------------------------------------------------------------------------------------------------------


def _floats(arrays: Sequence[Any]) -> list[int]:
    return [i for i, array in enumerate(arrays) if jax.numpy.issubdtype(array.dtype, np.inexact)]


def _filled(arrays: Sequence[Any], floats: Sequence[int], given: Sequence[Any]) -> list[Any]:
    filled = list(arrays)
    for i, array in zip(floats, given, strict=True):
        filled[i] = array
    return filled


@_handles("custom_jvp_call")
@once_for_all_alike
def _custom_jvp(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """Made again with the rewritten function, and with the author's rule, rewritten too."""
    inside = evaluator.inside(equation)
    arrays, like_traced = _arrays(values), _dtypes(equation.invars)
    floats = _floats(arrays)
    body = Body(inside, equation.params["call_jaxpr"], values)

    @jax.custom_jvp
    def function(*arrays: Any) -> list[Any]:
        return body(*arrays)

    def original(given: Sequence[Any], moved: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        before = [given[i] for i in floats]
        return jax.jvp(lambda *before: bind(equation, _filled(given, floats, before)), before, moved)

    @function.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        # The author's rule of the original function, over abstract values of the traced dtypes.
        before = _in(like_traced, primals)
        rule = jax.make_jaxpr(original)(before, [before[i] for i in floats])
        moved = [tangents[i] for i in floats]
        run = Body(inside, rule, [*values, *[Value(t) for t in moved]])
        outputs = run(*primals, *moved)
        half = len(outputs) // 2
        if not body.like:  # an eager derivative asks for the rule alone
            jax.eval_shape(body, *primals)
        primals_out = [cast(o, known.dtype) for o, known in zip(outputs[:half], body.like, strict=True)]
        tangents_out = [
            cast(o, known.dtype) if jax.numpy.issubdtype(known.dtype, np.inexact) else o
            for o, known in zip(outputs[half:], body.like, strict=True)
        ]
        return primals_out, tangents_out

    return body.results(function(*arrays))


@_handles("custom_vjp_call")
def _custom_vjp(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """Made again with the author's forward and backward rules, rewritten; left as it was traced where that fails."""
    values = evaluator.entering(equation, values)
    try:
        return _rebuilt_vjp(evaluator, equation, values)
    except UnknownPrimitiveError:
        raise
    except Exception:  # whatever the author's rules say to abstract values: then they run as they were written
        if evaluator.report is not None:
            evaluator.report.note(evaluator.path, "custom_vjp_call", opaque_kind(equation), _arrays(values))
        return [Value(output) for output in bind(equation, as_traced(equation.invars, values))]


def _rebuilt_vjp(evaluator: Evaluator, equation: Any, values: list[Value]) -> list[Value]:
    """The author's rules are asked for only where there is something to differentiate: a rule may call its function."""
    inside = evaluator.inside(equation)
    arrays, like_traced = _arrays(values), _dtypes(equation.invars)
    closed_over = equation.params.get("num_consts", 0)  # the rules know nothing of these
    floats = [i for i in _floats(arrays) if i >= closed_over]
    body = Body(inside, equation.params["call_jaxpr"], values)
    backward: list[Any] = []

    def original(*given: Any) -> tuple[list[Any], Any]:
        moved = [given[i] for i in floats]
        return jax.vjp(lambda *moved: bind(equation, _filled(given, floats, moved)), *moved)

    def rewritten(*given: Any) -> tuple[list[Any], list[Any]]:
        forward, (outputs, pullback) = jax.make_jaxpr(original, return_shape=True)(*_in(like_traced, given))
        residuals, treedef = jax.tree.flatten(pullback)
        backward[:] = [jax.make_jaxpr(lambda saved, ct: jax.tree.unflatten(treedef, saved)(ct))(residuals, outputs)]
        results = Body(inside, forward, values)(*given)
        return results[: len(outputs)], results[len(outputs) :]

    @jax.custom_vjp
    def function(*given: Any) -> list[Any]:
        return body(*given)

    def fwd(*primals: Any) -> tuple[list[Any], Any]:
        given = [primal.value for primal in primals]
        if any(primal.perturbed for primal in primals[:closed_over]):
            raise TypeError("A function with a custom_vjp rule is differentiated by what it closes over: hand that in.")
        try:
            outputs, saved = rewritten(*given)
        except UnknownPrimitiveError:
            raise
        except Exception:  # whatever the author's rules say to abstract values: then they run as they were written
            if evaluator.report is not None:
                evaluator.report.note(evaluator.path, "custom_vjp_call", opaque_kind(equation), given)
            outputs, saved = original(*_in(like_traced, given))
        return [cast(output, known.dtype) for output, known in zip(outputs, body.like, strict=True)], saved

    def bwd(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        cotangents = [jax.numpy.zeros(ct.shape, ct.dtype) if _is_zero(ct) else ct for ct in cotangents]
        if isinstance(saved, list):
            given = [*saved, *cotangents]
            found = Body(inside, backward[0], [Value(array) for array in given])(*given)
        else:
            found = saved(_in(_dtypes(equation.outvars), cotangents))
        gradients: list[Any] = [None] * len(arrays)
        for i, gradient in zip(floats, found, strict=True):
            gradients[i] = cast(gradient, arrays[i].dtype)
        return tuple(gradients)

    function.defvjp(fwd, bwd, symbolic_zeros=True)
    return body.results(function(*arrays))


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _in(dtypes: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    return [a if dtype is None else cast(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True)]

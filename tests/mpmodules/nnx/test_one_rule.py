"""A user's nnx code under a half-precision policy is written for float32, and is pure to its
caller.
"""

# What Flax returns is typed as Flax's own class.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import dataclasses
import threading
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.experimental import checkify

import policy
from mpmodules import nnx
from policy import DtypePolicyWarning, compute_dtype
from tests.mpmodules.one_rule_bodies import (
    CONTAINERS,
    DIFFERENTIABLE,
    MIXED,
    SEEN,
    X,
    checked,
    io,
    ours_in,
)
from tests.programs import named, operations

KEY = jax.random.key(0)


def _normal(rngs: flax_nnx.Rngs) -> flax_nnx.Param:
    return flax_nnx.Param(jax.random.normal(rngs.params(), (4, 4)))


class Model(nnx.Module):
    """A layer, a matmul of its own, and what `body` does with the result."""

    def __init__(self, body: Any = lambda x: x, *, rngs: flax_nnx.Rngs):
        self.layer, self.w, self.body = nnx.Linear(4, 4, rngs=rngs), _normal(rngs), body

    def __call__(self, x):
        return self.body(self.layer(x) @ self.w)


class Plain(flax_nnx.Module):
    """`Model` in Flax."""

    def __init__(self, body: Any = lambda x: x, *, rngs: flax_nnx.Rngs):
        self.layer, self.w, self.body = flax_nnx.Linear(4, 4, rngs=rngs), _normal(rngs), body

    def __call__(self, x):
        return self.body(self.layer(x) @ self.w)


def half(body: Any = lambda x: x, cls: Any = Model) -> Any:
    return cls(body, dtype_policy=MIXED, rngs=nnx.Rngs(0))


def pure(model: Any) -> tuple[Any, Any]:
    """A function of parameters and inputs, and the parameters."""
    graph, params, rest = flax_nnx.split(model, flax_nnx.Param, ...)
    return lambda params, x: flax_nnx.merge(graph, params, rest, copy=True)(x), params


def dots(model: Any, *, gradient: bool = False) -> set[tuple[str, ...]]:
    call, params = pure(model)
    total = lambda params: call(params, X).astype(jnp.float32).sum()  # noqa: E731
    return {
        op.inputs
        for op in named(operations(jax.grad(total) if gradient else total, params), "dot_general")
    }


# --- what the code sees ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [MIXED, "bfloat16", "float16", "p=f32,c=bf16,o=f16"])
def test_the_code_sees_float32_and_the_caller_output_dtype(text):
    seen, wanted = [], policy.get_policy(text)

    def body(x):
        seen.append((x.dtype.name, str(compute_dtype())))
        return x

    model = Model(body, dtype_policy=text, rngs=nnx.Rngs(0))
    assert model(X.astype(jnp.float16)).dtype == wanted.output_dtype
    assert set(seen) == {("float32", wanted.compute_dtype.name)}
    assert model.w.dtype == wanted.param_dtype
    assert dots(model) == {(wanted.compute_dtype.name,) * 2}


@pytest.mark.parametrize("body", [*DIFFERENTIABLE, "none"])
def test_without_a_policy_the_program_is_flaxs(body):
    function = DIFFERENTIABLE.get(body, lambda x: x)
    programs = []
    for cls in (Model, Plain):
        call, params = pure(cls(function, rngs=nnx.Rngs(0)))
        programs.append(str(jax.make_jaxpr(call)(params, X)))
    assert programs[0] == programs[1]


def test_calls_without_jit_are_traced_once():
    runs = []

    def body(x):
        runs.append(type(x).__name__)
        return x

    model = half(body)
    outs = [model(X) for _ in range(4)]
    assert len(runs) == 1
    np.testing.assert_array_equal(outs[0], outs[-1])
    model(X[:2])
    assert len(runs) == 2
    for _ in range(3):
        flax_nnx.grad(lambda m: m(X).sum())(model)
    assert len(runs) <= 4


class Counter(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.calls = nnx.Linear(4, 4, rngs=rngs), 0

    def __call__(self, x):
        self.calls += 1
        return self.layer(x)


class Outer(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = Counter(rngs=rngs)

    def __call__(self, x):
        return self.inner(self.inner(x))


def test_a_counter_in_python_counts_each_call():
    model, outer = (
        Counter(dtype_policy=MIXED, rngs=nnx.Rngs(0)),
        Outer(dtype_policy=MIXED, rngs=nnx.Rngs(0)),
    )
    for i in range(1, 4):
        model(X)
        outer(X)
        assert (model.calls, outer.inner.calls) == (i, 2 * i)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["eager", "jit"])
@pytest.mark.parametrize("how", CONTAINERS)
def test_lists_dicts_and_objects_are_the_callers(how, wrap):
    make, write, read = CONTAINERS[how]

    class Writes(nnx.Module):
        def __init__(self, *, rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x, container):
            x = self.layer(x)
            write(container, x)
            return x

    model = Writes(dtype_policy=MIXED, rngs=nnx.Rngs(0))

    def run(x):
        container = make()
        out = model(x, container)
        return out, read(container)

    for _ in range(2):  # the second call is not traced again
        out, held = (jax.jit(run) if wrap == "jit" else run)(X)
        assert isinstance(held, jax.Array)  # no tracer
        np.testing.assert_array_equal(held.astype(jnp.float32), out)


# --- what can't be traced -------------------------------------------------------------------------


@dataclasses.dataclass
class Holder:
    """No pytree."""

    x: Any


FALLBACKS = {
    "branch": (lambda x: x * 2 if x.sum() > -1e9 else x, "needs the values of arrays"),
    "float": (lambda x: x * float(x.sum() > -1e9), "needs the values of arrays"),
    "object": (Holder, "returns a Holder"),
    "function": (lambda x: lambda: x, "returns a function"),
}


@pytest.mark.parametrize("how", FALLBACKS)
@pytest.mark.parametrize("derivative", [False, True])
def test_code_that_cannot_be_traced_runs_as_written_and_warns_once(how, derivative):
    body, reason = FALLBACKS[how]
    model = half(body)

    def call(model):
        out = model(X)
        out = out.x if how == "object" else out() if how == "function" else out
        return out.astype(jnp.float32).sum()

    line = "" if how in ("object", "function") else r" at test_one_rule\.py:\d+ \(`"
    with pytest.warns(DtypePolicyWarning, match=f"^Model can't be traced{line}") as told:
        for _ in range(2):
            flax_nnx.value_and_grad(call)(model) if derivative else call(model)
    assert len(told) == 1 and reason in str(told[0].message)


def test_a_class_that_keeps_its_code_is_silent_and_runs_in_the_dtypes_that_it_meets():
    class Keeps(nnx.Module):
        own_code = "keep"

        def __init__(self, *, rngs):
            self.layer, self.w = nnx.Linear(4, 4, rngs=rngs), nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x):
            seen.append((x.dtype.name, self.layer(x).dtype.name, self.w[...].dtype.name))
            return x if float(x.astype(jnp.float32).sum()) > 1e9 else x * 2

    seen: list[Any] = []
    model = Keeps(dtype_policy=MIXED, rngs=nnx.Rngs(0))
    assert model(X).dtype == jnp.float32
    assert seen == [("bfloat16", "bfloat16", "float32")]


@pytest.mark.parametrize("how", ["eager", "jit", "grad"])
def test_an_error_ends_on_the_users_line_with_few_frames_of_ours(how):
    def body(x):
        return x @ jnp.ones((7, 7))

    wrap = {"eager": lambda f: f, "jit": flax_nnx.jit, "grad": flax_nnx.grad}[how]
    with pytest.raises(TypeError) as raised:
        wrap(lambda model: model(X).sum())(half(body))
    names = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    own = [name for name in names if "/jax/" not in name]
    assert own[-1] == __file__ and ours_in(raised.value) <= 12


# --- effects and derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("body", DIFFERENTIABLE)
def test_bodies_of_jax_keep_their_meaning_and_derivatives(body):
    model, truth = half(DIFFERENTIABLE[body]), Plain(DIFFERENTIABLE[body], rngs=nnx.Rngs(0))
    for wrap in (lambda f: f, jax.jit):
        gradients = []
        for each in (model, truth):
            call, params = pure(each)
            total = lambda params, call=call: call(params, X).sum()  # noqa: E731
            gradients.append(wrap(jax.grad(total))(params))
        for ours, theirs in zip(*map(jax.tree.leaves, gradients), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=0.05 * float(jnp.abs(theirs).max()))
    assert dots(model, gradient=True) == {("bfloat16",) * 2}


def test_callbacks_run_once_for_each_call_and_get_float32():
    SEEN.clear()
    for body in (io, DIFFERENTIABLE["debug_callback"]):
        model = half(body)
        for _ in range(2):  # the second is not traced again
            model(X)
        jax.jit(lambda x, model=model: model(x))(X)
        jax.effects_barrier()
    assert SEEN == ["float32"] * 6


def test_debug_print_prints_once_for_each_call(capfd):
    model = half(DIFFERENTIABLE["debug_print"])
    for _ in range(2):
        model(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("of 12") == 2


def test_checks_are_functionalised():
    call, params = pure(half(checked))
    for run in (lambda f: f, jax.jit):
        check = run(checkify.checkify(call))
        assert check(params, X)[0].get() is None
        assert "too large" in str(check(params, X * 1e12)[0].get())


def test_a_saved_name_is_saved_in_half():
    call, params = pure(half(DIFFERENTIABLE["checkpointed"]))
    names = named(operations(jax.grad(lambda p: call(p, X).sum()), params), "name")
    assert names and {op.outputs for op in names} == {("bfloat16",)}


def test_second_derivatives_and_forward_mode():
    def loss(w, cls):
        model = cls(rngs=nnx.Rngs(0), **({"dtype_policy": MIXED} if cls is Model else {}))
        model.w.set_value(w)
        return jnp.square(model(X)).sum()

    w = Plain(rngs=nnx.Rngs(0)).w[...]
    for derive in (
        jax.hessian,
        jax.jacfwd,
        jax.jacrev,
        lambda f: lambda w, m: jax.jvp(lambda w: f(w, m), (w,), (jnp.ones_like(w),))[1],
        lambda f: lambda w, m: jax.linearize(lambda w: f(w, m), w)[1](jnp.ones_like(w)),
    ):
        ours, theirs = (derive(loss)(w, cls) for cls in (Model, Plain))
        np.testing.assert_allclose(ours, theirs, atol=0.05 * float(jnp.abs(theirs).max()))


# --- transformations ------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.layer, self.w = (
            nnx.LayerNorm(4, rngs=rngs),
            nnx.Linear(4, 4, rngs=rngs),
            _normal(rngs),
        )

    def __call__(self, x):
        return self.layer(self.norm(x) @ self.w)


def stacked(rngs: Any) -> Any:
    return nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs=rngs), in_axes=0, out_axes=0))(
        rngs
    )


RUNS: dict[str, Any] = {
    "jit": nnx.jit(lambda block, x: block(x)),
    "remat": nnx.remat(lambda block, x: block(x)),
    "scan": nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry),
    "scan of remat": nnx.scan(
        nnx.remat(lambda block, x: block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
    ),
    "vmap": nnx.vmap(lambda block, x: block(x), in_axes=(0, None), out_axes=0),
}


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("where", ["outermost", "inside"])
def test_transformations_of_nnx(how, where):
    class Around(nnx.Module):
        def __init__(self, *, rngs):
            self.blocks = Block(rngs=rngs) if how in ("jit", "remat") else stacked(rngs)

        def __call__(self, x):
            return RUNS[how](self.blocks, x * 2)

    half, wide = (Around(rngs=nnx.Rngs(0), dtype_policy=text) for text in (MIXED, None))
    run = (lambda m: m) if where == "inside" else (lambda m: lambda x: RUNS[how](m.blocks, x))
    out, truth = (run(model)(X) for model in (half, wide))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, truth, atol=0.05 * float(jnp.abs(truth).max()))
    found = named(operations(lambda x: run(flax_nnx.clone(half))(x), X), "dot_general")
    assert {op.inputs for op in found} == {("bfloat16",) * 2}


# --- state ----------------------------------------------------------------------------------------


class Busy(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.dropout = (
            nnx.BatchNorm(4, momentum=0.5, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )

    def __call__(self, x):
        return self.dropout(self.dropout(self.norm(x)) * 2)


def test_statistics_and_dropout_are_those_of_flax():
    x = 1 + jax.random.normal(KEY, (64, 4))
    half, wide = (Busy(rngs=nnx.Rngs(0, dropout=1), dtype_policy=text) for text in (MIXED, None))
    for call in (lambda m: m(x), flax_nnx.jit(lambda m: m(x))):
        np.testing.assert_array_equal(call(half) == 0, call(wide) == 0)
    assert half.dropout.rngs.count[...] == wide.dropout.rngs.count[...] == 4
    for name in ("mean", "var"):  # the layer rounds its inputs to bfloat16
        ours, truth = (getattr(model.norm, name)[...] for model in (half, wide))
        np.testing.assert_allclose(ours, truth, rtol=2**-8)


class Cached(nnx.Module):
    """Attention's cache, written by hand."""

    def __init__(self, how, *, rngs):
        self.how, self.layer = how, nnx.Linear(4, 4, rngs=rngs)
        self.keys = nnx.Cache(jnp.zeros((8, 4), jnp.bfloat16))
        self.index = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        key = self.layer(x)
        index, keys = self.index[...], self.keys[...]
        if self.how == "slice":
            keys = jax.lax.dynamic_update_slice(keys, key.astype(keys.dtype), (index, 0))
        else:
            keys = keys.at[index].set(key[0].astype(keys.dtype))
        self.keys[...], self.index[...] = keys, index + 1
        return keys @ key[0].astype(keys.dtype)


@pytest.mark.parametrize("how", ["slice", "at"])
def test_a_cache_in_half_stays_in_half(how):
    model = Cached(how, dtype_policy=MIXED, rngs=nnx.Rngs(0))
    for _ in range(2):
        assert model(X[:1]).dtype == jnp.float32
    assert model.keys[...].dtype == jnp.bfloat16 and int(model.index[...]) == 2
    assert not (model.keys[:2] == 0).all(1).any() and (model.keys[2:] == 0).all()
    ops = operations(lambda x: flax_nnx.clone(model)(x), X[:1])
    written = [op for op in ops if op.name in ("dynamic_update_slice", "scatter")]
    assert written and {op.outputs for op in written} == {("bfloat16",)}


def test_two_threads_with_two_policies_do_not_mix():
    barrier, found = threading.Barrier(2), {}

    def body(x):
        barrier.wait(timeout=60)
        return x * (2 if str(compute_dtype()) == "bfloat16" else 3)

    def work(text, dtype):
        model = Model(body, dtype_policy=text, rngs=nnx.Rngs(0))
        ops = operations(lambda x: flax_nnx.clone(model)(x), X)
        found[text] = {op.outputs for op in named(ops, "dot_general", "mul")} == {(dtype,)}

    texts = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
    threads = [threading.Thread(target=work, args=pair) for pair in texts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(texts, True)

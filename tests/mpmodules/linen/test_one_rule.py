"""A user's linen code under a half-precision policy is written for float32, and is pure to its
caller.
"""

from __future__ import annotations

import dataclasses
import threading
import traceback
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from mpmodules import linen as nn
from policy import DtypePolicyWarning, compute_dtype, get_policy, use_policy
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
from tests.programs import apply, named, operations

KEY = jax.random.key(0)


class Model(nn.Module):
    """A layer, a matmul of its own, and what `body` does with the result."""

    body: Any = lambda x: x

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        return self.body(x @ self.param("w", nn.initializers.normal(1.0), (4, 4)))


class Plain(flax_nn.Module):
    """`Model` in Flax."""

    body: Any = lambda x: x

    @flax_nn.compact
    def __call__(self, x):
        x = flax_nn.Dense(4)(x)
        return self.body(x @ self.param("w", flax_nn.initializers.normal(1.0), (4, 4)))


VARIABLES = Plain().init(KEY, X)


def half(body: Any = lambda x: x) -> Any:
    return Model(body, dtype_policy=MIXED)


# --- what the code sees ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", [MIXED, "bfloat16", "float16", "p=f32,c=bf16,o=f16"])
def test_the_code_sees_float32_and_the_caller_output_dtype(text):
    seen, wanted = [], get_policy(text)

    def body(x):
        seen.append((x.dtype.name, str(compute_dtype())))
        return x

    model = Model(body, dtype_policy=text)
    variables = jax.eval_shape(model.init, KEY, X)
    out = jax.eval_shape(model.apply, variables, X.astype(jnp.float16))
    assert set(seen) == {("float32", wanted.compute_dtype.name)}
    assert out.dtype == wanted.output_dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {wanted.param_dtype}
    dots = named(operations(model.apply, variables, X), "dot_general")
    assert {op.inputs for op in dots} == {(wanted.compute_dtype.name,) * 2}


@pytest.mark.parametrize("body", [*DIFFERENTIABLE, "none"])
def test_without_a_policy_the_program_is_flaxs(body):
    function = DIFFERENTIABLE.get(body, lambda x: x)
    programs = [
        str(jax.make_jaxpr(model.apply)(VARIABLES, X)).replace("Plain", "Model")
        for model in (Model(function), Plain(function))
    ]
    assert programs[0] == programs[1]


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["eager", "jit"])
@pytest.mark.parametrize("how", CONTAINERS)
def test_lists_dicts_and_objects_are_the_callers(how, wrap):
    make, write, read = CONTAINERS[how]

    class Writes(nn.Module):
        @nn.compact
        def __call__(self, x, container):
            x = nn.Dense(4)(x)
            write(container, x)
            return x

    model: Any = Writes(dtype_policy=MIXED)
    variables = model.init(KEY, X, make())

    def run(variables, x):
        container = make()
        out = model.apply(variables, x, container)
        return out, read(container)

    out, held = (jax.jit(run) if wrap == "jit" else run)(variables, X)
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
    "numpy": (lambda x: x * np.asarray(x).ndim, "needs the values of arrays"),
    "object": (Holder, "returns a Holder"),
    "function": (lambda x: lambda: x, "returns a function"),
}


@pytest.mark.parametrize("how", FALLBACKS)
@pytest.mark.parametrize("derivative", [False, True])
def test_code_that_cannot_be_traced_runs_as_written_and_warns_once(how, derivative):
    body, reason = FALLBACKS[how]

    def call(variables):
        out = half(body).apply(variables, X)
        out = out.x if how == "object" else out() if how == "function" else out
        return out.astype(jnp.float32).sum()

    if how == "numpy" and derivative:
        pytest.skip("NumPy takes no tracer of a derivative")
    line = "" if how in ("object", "function") else r" at test_one_rule\.py:\d+ \(`"
    with pytest.warns(DtypePolicyWarning, match=f"^Model can't be traced{line}") as told:
        for _ in range(2):
            jax.value_and_grad(call)(VARIABLES) if derivative else call(VARIABLES)
    assert len(told) == 1 and reason in str(told[0].message)


def test_a_class_that_keeps_its_code_is_silent_and_runs_in_the_dtypes_that_it_meets():
    class Keeps(nn.Module):
        own_code = "keep"

        @nn.compact
        def __call__(self, x):
            seen.append((x.dtype.name, nn.Dense(4)(x).dtype.name))
            return x if float(x.astype(jnp.float32).sum()) > 1e9 else x * 2

    seen: list[Any] = []
    model: Any = Keeps(dtype_policy=MIXED)
    out = model.apply(model.init(KEY, X), X)
    assert out.dtype == jnp.float32 and set(seen) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_an_error_ends_on_the_users_line_with_few_frames_of_ours(wrap):
    def body(x):
        return x @ jnp.ones((7, 7))

    with pytest.raises(TypeError) as raised:
        wrap(lambda v: half(body).apply(v, X).sum())(VARIABLES)
    names = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    own = [name for name in names if "/jax/" not in name]
    assert own[-1] == __file__ and ours_in(raised.value) <= 12


# --- effects and derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("body", DIFFERENTIABLE)
def test_bodies_of_jax_keep_their_meaning_and_derivatives(body):
    model, truth = half(DIFFERENTIABLE[body]), Plain(DIFFERENTIABLE[body])

    def loss(model):
        return lambda v: (apply(model, v, X).astype(jnp.float32)).sum()

    for wrap in (lambda f: f, jax.jit):
        ours, theirs = (wrap(jax.grad(loss(each)))(VARIABLES) for each in (model, truth))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05 * abs(b).max()),
            ours,
            theirs,
        )
    dots = named(operations(jax.grad(loss(model)), VARIABLES), "dot_general")
    assert {op.inputs for op in dots} == {("bfloat16",) * 2}


def test_callbacks_run_once_for_each_call_and_get_float32():
    SEEN.clear()
    for body in (io, DIFFERENTIABLE["debug_callback"]):
        for call in (half(body).apply, jax.jit(half(body).apply)):
            call(VARIABLES, X)
        jax.effects_barrier()
    assert SEEN == ["float32"] * 4


def test_debug_print_prints_once(capfd):
    half(DIFFERENTIABLE["debug_print"]).apply(VARIABLES, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("of 12") == 1


def test_checks_are_functionalised():
    for run in (lambda f: f, jax.jit):
        check = run(checkify.checkify(half(checked).apply))
        assert check(VARIABLES, X)[0].get() is None
        assert "too large" in str(check(VARIABLES, X * 1e12)[0].get())


def test_a_saved_name_is_saved_in_half():
    model = half(DIFFERENTIABLE["checkpointed"])
    names = named(operations(jax.grad(lambda v: model.apply(v, X).sum()), VARIABLES), "name")
    assert names and {op.outputs for op in names} == {("bfloat16",)}


def test_second_derivatives_and_forward_mode():
    def loss(w, model):
        variables = {"params": {**VARIABLES["params"], "w": w}}
        return jnp.square(apply(model, variables, X).astype(jnp.float32)).sum()

    w = VARIABLES["params"]["w"]
    for derive in (
        jax.hessian,
        jax.jacfwd,
        jax.jacrev,
        lambda f: lambda w, m: jax.jvp(lambda w: f(w, m), (w,), (jnp.ones_like(w),))[1],
        lambda f: lambda w, m: jax.linearize(lambda w: f(w, m), w)[1](jnp.ones_like(w)),
    ):
        ours, theirs = (derive(loss)(w, model) for model in (half(), Plain()))
        np.testing.assert_allclose(ours, theirs, atol=0.05 * float(jnp.abs(theirs).max()))


# --- lifted ---------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = nn.LayerNorm()(x) @ self.param("w", nn.initializers.normal(1.0), (4, 4))
        return nn.Dense(4)(x), None

    def twice(self, x):
        return self(self(x)[0])[0]


LIFTS = {
    "jit": nn.jit,
    "remat": nn.remat,
    "scan": lambda cls: nn.scan(
        cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    ),
    "vmap": lambda cls: nn.vmap(
        cls, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
    ),
    "remat scan": lambda cls: LIFTS["scan"](nn.remat(cls)),
}


@pytest.mark.parametrize("how", LIFTS)
@pytest.mark.parametrize("where", ["outermost", "inside"])
def test_lifted_classes(how, where):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return (
                LIFTS[how](Block)(name="block")(x * 2)
                if how == "vmap"
                else (LIFTS[how](Block)(name="block")(x * 2, None))
            )

    make: Any = Outer if where == "inside" else LIFTS[how](Block)
    args = (X,) if where == "inside" or how == "vmap" else (X, None)
    variables = make().init(KEY, *args)
    model: Any = make(dtype_policy=MIXED)

    def loss(model):
        return lambda v: apply(model, v, *args)[0].astype(jnp.float32).sum()

    dots = named(operations(jax.grad(loss(model)), variables), "dot_general")
    assert {op.inputs for op in dots} == {("bfloat16",) * 2}
    out, truth = (apply(each, variables, *args)[0] for each in (model, make()))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, truth, atol=0.05 * float(jnp.abs(truth).max()))


@pytest.mark.parametrize("how", ["jit", "remat"])
def test_lifted_methods(how):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = Block()
            return getattr(nn, how)(Block.twice)(block, x)

    model: Any = Outer(dtype_policy=MIXED)
    dots = named(operations(model.apply, model.init(KEY, X), X), "dot_general")
    assert len(dots) == 4 and {op.inputs for op in dots} == {("bfloat16",) * 2}


# --- state ----------------------------------------------------------------------------------------


class Busy(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dropout(0.5, deterministic=False)(x * 2)


def test_statistics_and_dropout_are_those_of_flax():
    x = 1 + jax.random.normal(KEY, (64, 4))
    keys = {"params": KEY, "dropout": jax.random.key(1)}
    variables = Busy().init(keys, x)
    (wide, truth), (out, state) = (
        Busy(dtype_policy=text).apply(variables, x, rngs=keys, mutable=["batch_stats"])
        for text in (None, MIXED)
    )
    np.testing.assert_array_equal(wide == 0, out == 0)
    # the layer rounds its inputs to bfloat16
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), state, truth)


class Cached(nn.Module):
    """Attention's cache, written by hand."""

    how: str

    @nn.compact
    def __call__(self, x):
        key = nn.Dense(4)(x)
        cache = self.variable("cache", "keys", jnp.zeros, (8, 4), jnp.bfloat16)
        index = self.variable("cache", "index", lambda: jnp.array(0))
        if self.how == "slice":
            cache.value = jax.lax.dynamic_update_slice(
                cache.value, key.astype(cache.value.dtype), (index.value, 0)
            )
        else:
            cache.value = cache.value.at[index.value].set(key[0].astype(cache.value.dtype))
        index.value = index.value + 1
        return cache.value @ key[0].astype(cache.value.dtype)


@pytest.mark.parametrize("how", ["slice", "at"])
def test_a_cache_in_half_stays_in_half(how):
    model: Any = Cached(how, dtype_policy=MIXED)
    variables = model.init(KEY, X[:1])
    run = lambda v: model.apply(v, X[:1], mutable=["cache"])  # noqa: E731
    before = variables["cache"]["keys"]
    out, state = run(variables)
    assert before.dtype == state["cache"]["keys"].dtype == jnp.bfloat16
    assert out.dtype == jnp.float32 and int(state["cache"]["index"]) == 2
    ops = operations(run, variables)
    wide = [op for op in ops if op.name in ("dynamic_update_slice", "scatter")]
    assert wide and {op.outputs for op in wide} == {("bfloat16",)}


def fresh_cache(nn: Any) -> Any:
    """Attention's cache without a cast, in a module for each half of a pair of imports."""

    class Writes(nn.Module):
        how: str
        in_setup: bool = False

        def setup(self):
            if self.in_setup:
                self.made = self.made_there()

        def made_there(self):
            return self.variable("cache", "keys", jnp.zeros, (8, 4), jnp.bfloat16)

        @nn.compact
        def __call__(self, x, _=None):
            cache = self.made if self.in_setup else self.made_there()
            index = self.variable("cache", "index", lambda: jnp.array(0))
            key = self.param("key", nn.initializers.ones, (4, 4))
            for _ in range(2):
                update = jax.lax.dynamic_update_slice
                if self.how == "slice":
                    cache.value = update(cache.value, x @ key, (index.value, 0))
                else:
                    cache.value = cache.value.at[index.value].set((x @ key)[0])
                index.value = index.value + 1
            return x + cache.value.sum(0, keepdims=True), None

    class Scans(nn.Module):
        how: str

        @nn.compact
        def __call__(self, x, _=None):
            axes = {"params": 0, "cache": 0}
            body = nn.scan(Writes, axes, split_rngs={"params": True}, length=2)
            return body(self.how)(x, None)

    class Inside(nn.Module):
        how: str
        in_setup: bool = False

        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(Writes(self.how, self.in_setup)(x)[0]), None

    return {
        "alone": Writes,
        "inside": Inside,
        "setup": lambda how: Writes(how, True),
        "inside, setup": lambda how: Inside(how, True),
        "scan": Scans,
    }


@pytest.mark.parametrize("where", fresh_cache(nn))
@pytest.mark.parametrize("wing", ["ours", "port"])
@pytest.mark.parametrize("how", ["slice", "at"])
def test_a_fresh_cache_in_half_may_be_written_with_what_the_code_computes(how, wing, where):
    plain = fresh_cache(flax_nn)[where](how)
    model = (
        fresh_cache(nn)[where](how).clone(dtype_policy=MIXED)
        if wing == "ours"
        else nn.apply_policy(plain, MIXED)
    )
    variables = model.init(KEY, X[:1])
    _, fresh = model.apply({"params": variables["params"]}, X[:1], mutable=["cache"])
    (out, _), state = model.apply(variables, X[:1], mutable=["cache"])
    structures = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree)
        for tree in (variables["cache"], fresh["cache"], state["cache"])
    ]
    assert structures[0] == structures[1] == structures[2] and out.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(fresh)} == {"bfloat16", "int32"}
    for a, b in zip(
        jax.tree.leaves(fresh["cache"]), jax.tree.leaves(variables["cache"]), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_two_threads_with_two_policies_do_not_mix():
    barrier, found = threading.Barrier(2), {}

    def body(x):
        barrier.wait(timeout=60)
        return x * (2 if str(compute_dtype()) == "bfloat16" else 3)

    def work(text, dtype):
        with use_policy(text):
            ops = operations(Model(body).apply, VARIABLES, X)
        found[text] = {op.outputs for op in named(ops, "dot_general", "mul")} == {(dtype,)}

    texts = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
    threads = [threading.Thread(target=work, args=pair) for pair in texts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(texts, True)

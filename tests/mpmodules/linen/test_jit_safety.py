"""A policy is part of every jit cache key: another policy is another trace, and going back reuses
the first one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpmodules import linen as nn
from policy import compute_dtype, set_policy, use_policy
from tests.programs import apply as apply_model
from tests.programs import named, operations

A, B = "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"
ABA = ((A, "bfloat16"), (B, "float16"), (A, "bfloat16"))
X = jnp.ones((2, 3))
KEY = jax.random.key(0)


def counted(traces: list[str]) -> Any:
    """A model that notes each time Python runs its body, and in which compute_dtype."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(str(compute_dtype() or x.dtype))
            return nn.Dense(3)(x)

    return Net()


@pytest.mark.parametrize("by", [use_policy, set_policy], ids=["scope", "global"])
def test_a_jitted_apply_follows_the_policy_with_one_trace_per_policy(by):
    traces: list[str] = []
    model = counted(traces)
    variables = model.init(KEY, X)
    traces.clear()
    apply = jax.jit(model.apply)
    for policy, expected in ABA:
        with by(policy) or contextlib.nullcontext():
            assert apply(variables, X).dtype == expected
    set_policy(None)
    assert apply(variables, X).dtype == jnp.float32
    assert traces == ["bfloat16", "float16", "float32"]


def test_equal_policies_made_differently_share_a_trace():
    traces: list[str] = []
    model = counted(traces)
    variables = model.init(KEY, X)
    traces.clear()
    apply = jax.jit(model.apply)
    for policy in (
        "mixed_bfloat16",
        "params=float32, compute=bfloat16, output=float32",
        "p=f32,c=bf16,o=f32",
    ):
        with use_policy(policy):
            apply(variables, X)
    assert traces == ["bfloat16"]


@pytest.mark.parametrize("kind", ["nn.jit class", "nn.jit method", "jit of a block"])
def test_an_inner_jit_follows_the_scope(kind):
    traces: list[str] = []

    class Block(nn.Module):
        def body(self, x):
            traces.append(str(compute_dtype()))
            return nn.Dense(3)(x) * 2

        @nn.compact
        def __call__(self, x):
            return nn.jit(Block.body)(self, x) if kind == "nn.jit method" else self.body(x)

    cls = nn.jit(Block) if kind == "nn.jit class" else Block

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return cls()(cls()(x))

    model = Net()
    variables = model.init(KEY, X)
    traces.clear()
    run = functools.partial(apply_model, model)
    run = jax.jit(run) if kind == "jit of a block" else run
    for policy, expected in ABA:
        with use_policy(policy):
            assert run(variables, X).dtype == expected
            ops = named(operations(run, variables, X), "dot_general", "mul")
        assert {op.inputs[0] for op in ops} == {expected}
    assert sorted(set(traces)) == ["bfloat16", "float16"]


@pytest.mark.parametrize("transform", ["scan", "checkpoint", "grad of checkpoint", "vmap", "cond"])
def test_a_model_inside_a_jax_transform_follows_the_scope(transform):
    model = counted([])
    variables = model.init(KEY, X)

    def run(variables, x):
        if (
            transform == "scan"
        ):  # the carry stays float32, the stacked output has the policy's dtype
            return lax.scan(
                lambda carry, row: (carry, model.apply(variables, row)), jnp.zeros(()), x
            )[1]
        if transform == "vmap":
            return jax.vmap(lambda row: model.apply(variables, row))(x)
        if transform == "cond":
            return lax.cond(
                x.sum() > 0, model.apply, lambda v, x: 2 * model.apply(v, x), variables, x
            )
        if transform == "checkpoint":
            return jax.checkpoint(model.apply)(variables, x)
        loss, _ = jax.value_and_grad(lambda v: jax.checkpoint(model.apply)(v, x).sum())(variables)
        return loss

    jitted = jax.jit(run)
    for policy, expected in ABA:
        with use_policy(policy):
            assert jax.eval_shape(jitted, variables, X).dtype == expected
            assert jitted(variables, X).dtype == expected


def test_another_thread_sees_the_global_policy_and_not_this_threads_scope():
    model = counted([])
    variables = model.init(KEY, X)
    apply = jax.jit(model.apply)
    seen = []

    def elsewhere():
        seen.append(apply(variables, X).dtype.name)

    def run_elsewhere():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with use_policy(A):
        assert apply(variables, X).dtype == "bfloat16"
        run_elsewhere()
    set_policy(B)
    with use_policy(A):
        run_elsewhere()
        assert apply(variables, X).dtype == "bfloat16"
    assert seen == ["float32", "float16"]


def test_two_threads_call_the_same_module_under_different_policies():
    """Fields are put in place for a call; a module bound in one thread is no other thread's."""
    model = nn.Dense(3)
    variables = model.init(KEY, X)
    wrong: list[Any] = []
    gate = threading.Barrier(2)

    def work(policy, expected):
        gate.wait()
        for _ in range(20):
            with use_policy(policy):
                dtype = jax.eval_shape(lambda v: model.apply(v, X), variables).dtype
            if dtype != expected:
                wrong.append((policy, dtype))

    threads = [threading.Thread(target=work, args=pair) for pair in ABA[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_policy_of_the_modules_own_is_the_same_under_every_scope():
    model = counted([]).clone(dtype_policy=A)
    variables = model.init(KEY, X)
    for policy in (None, A, B):
        with use_policy(policy):
            assert jax.jit(model.apply)(variables, X).dtype == "bfloat16"


def test_a_step_compiled_ahead_of_time_keeps_the_policy_it_was_lowered_under():
    model = nn.Dense(3)
    variables = model.init(KEY, X)
    with use_policy(A):
        compiled = jax.jit(model.apply).lower(variables, X).compile()
    assert compiled(variables, X).dtype == "bfloat16"


def test_donated_parameters_are_updated_in_place_under_a_policy():
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)], dtype_policy="mixed_bfloat16")
    variables = model.init(KEY, X)

    def step(variables, x):
        gradients = jax.grad(lambda v: jnp.square(apply_model(model, v, x)).sum())(variables)
        return jax.tree.map(lambda p, g: p - 0.1 * g, variables, gradients)

    lowered = jax.jit(step, donate_argnums=0).lower(variables, X)
    assert lowered.as_text().count("tf.aliasing_output") == 4
    updated = lowered.compile()(variables, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updated)} == {"float32"}


def test_apply_policy_is_not_stale_under_nn_jit():
    """Flax's interceptors are no part of its jit key; the scope that is entered with ours is."""
    model = flax_nn.Sequential([flax_nn.jit(flax_nn.Dense)(3)])
    variables = model.init(KEY, X)
    dtypes = []
    for policy in (A, B, A):
        dtypes.append(apply_model(nn.apply_policy(model, policy), variables, X).dtype.name)
    assert dtypes == ["bfloat16", "float16", "bfloat16"]

"""Steps that the host runs as one of two programs, beside those with a conditional."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import linen as nn
from mpmodules import nnx
from tests.policy.inspect.monitor.test_monitor import given, rows_of, sgd
from tests.policy.inspect.monitor.test_nnx import X, made, train_step

DONATING = functools.partial(jax.jit, donate_argnums=0)


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.parametrize("on_nonfinite", [True, False])
def test_results_and_records_are_those_of_a_step_with_a_conditional(on_nonfinite):
    params, x = given()
    options: Any = {"every": 3, "on_nonfinite": on_nonfinite}
    step = policy.monitor(sgd, **options, jit=DONATING)
    other = jax.jit(policy.monitor(sgd, **options))
    ours, theirs, finite = copied(params), params, []
    for i in range(6):
        batch = x.at[1].set(jnp.inf) if i == 4 else x
        (ours, loss), snapshot = step(i, ours, batch)
        (theirs, expected), beside = other(i, theirs, batch)
        equal((ours, loss), (theirs, expected))
        record = snapshot.record()
        assert record == beside.record() and int(snapshot.step) == i
        finite.append(record and not record["outputs"])
    late = [False] * 2 if on_nonfinite else [None] * 2
    assert finite == [True, None, None, True, *late]


def test_other_steps_run_the_steps_own_program():
    params, x = given()
    programs = []

    def jit(fn):
        programs.append(DONATING(fn))
        return programs[-1]

    policy.monitor(sgd, on_nonfinite=False, jit=jit)
    plain, _ = programs
    found, own = (each.trace(params, x) for each in (plain, DONATING(sgd)))
    assert str(found.jaxpr) == str(own.jaxpr)
    assert jax.tree.leaves(found.args_info) == jax.tree.leaves(own.args_info)


def test_options_of_jit_are_those_of_the_step():
    params, x = given()

    def powers(params, power, x):
        assert isinstance(power, int)
        return sgd(params, x**power)

    around = functools.partial(jax.jit, static_argnames="power")
    for step in (policy.monitor(powers, jit=around), around(policy.monitor(powers))):
        for number in (0, 1):
            (_, loss), _ = step(number, params, 2, x)
            np.testing.assert_allclose(loss, sgd(params, x**2)[1], rtol=1e-6)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(16, name="up")(x)))


@policy.use_policy("mixed_float16")
def test_a_step_that_is_skipped_is_taken_with_its_own_state():
    model = Model()
    tx = policy.mixed_precision(optax.adam(1e-2), "mixed_float16", loss_scale="dynamic")

    def step(params, state, x):
        def loss_of(params):
            return jnp.mean(jnp.square(jnp.asarray(model.apply(params, x), jnp.float32)))

        scale = policy.loss_scale_of(state)
        loss, gradients = policy.value_and_grad(loss_of, loss_scale=scale)(params)
        params, state, _ = policy.apply_gradients(tx, params, state, gradients)
        return params, state, loss

    params = model.init(jax.random.key(0), X)
    around = functools.partial(jax.jit, donate_argnums=(0, 1))
    watched, plain = policy.monitor(step, jit=around), jax.jit(step)
    ours, theirs = copied((params, tx.init(params))), (params, tx.init(params))
    for i, x in enumerate((X, X, X.at[2].set(1e6), X), 1):
        (*ours, _), snapshot = watched(i, *ours, x)
        *theirs, _ = plain(*theirs, x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, [*theirs])
        record = snapshot.record()
        assert bool(record) == (i == 3)
        if record:
            first: Any = record["first"]
            assert record["outputs"] and record["skipped"]
            assert (record["loss_scale"], first["path"]) == (2.0**15, "up")


def test_modules_that_overflow_are_taken_with_their_own_state():
    (model, optimizer), (other, other_optimizer) = made("mixed_float16"), made("mixed_float16")
    step, plain = policy.monitor(train_step, every=10, jit=nnx.jit), nnx.jit(train_step)
    for i, x in enumerate((X, X, 1e6 * X, X)):
        loss, snapshot = step(i, model, optimizer, x)
        np.testing.assert_array_equal(loss, plain(other, other_optimizer, x))
        record: Any = snapshot.record()
        assert (record and not record["outputs"]) == (True, None, False, None)[i]
        if i == 2:
            assert record["skipped"] and rows_of(record)["up", "activation"]["numbers"]["inf"] > 0
    states = (flax_nnx.state(each, flax_nnx.Param) for each in (model, other))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *states)
    counts = (flax_nnx.state(each, flax_nnx.RngCount) for each in (model, other))
    equal(*counts)

"""Optax's own wrappers inside of ours, TrainState around it, averages beside it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from policy import select_tree
from policy.grads.loss_scale import DynamicLossScale
from policy.grads.value_and_grad import value_and_grad
from policy.optim import apply_gradients, finite_of, loss_scale_of, master_params, mixed_precision

RNG = np.random.default_rng(0)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=3), jnp.bfloat16),
    "w": jnp.asarray(RNG.normal(size=(2, 3)), jnp.bfloat16),
}
GRADIENTS = jax.tree.map(
    lambda p: jnp.asarray(RNG.normal(size=(12, *p.shape)), jnp.bfloat16), PARAMS
)
ON_W = {"b": False, "w": True}
LABELS = {"b": "slow", "w": "fast"}

INSIDE: dict[str, Any] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 3),
    "MultiSteps, its own transform": lambda: optax.MultiSteps(
        optax.adamw(1e-2), 3
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "an injected schedule": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(1e-2, 1e-3, 10)
    ),
    "a schedule": lambda: optax.sgd(optax.exponential_decay(1e-2, 3, 0.5), momentum=0.9),
    "masked": lambda: optax.chain(
        optax.masked(optax.adam(1e-2), ON_W), optax.masked(optax.set_to_zero(), flipped())
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-4)}, LABELS
    ),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


def flipped():
    return jax.tree.map(lambda on: not on, ON_W)


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@pytest.mark.parametrize("name", INSIDE)
def test_what_goes_inside_moves_the_master_as_in_an_all_float32_run(name):
    tx = mixed_precision(INSIDE[name](), "bfloat16", loss_scale="dynamic")
    inner: Any = INSIDE[name]()

    def ours(carry, gradient):
        params, state, _ = apply_gradients(tx, carry[0], carry[1], gradient)
        return (params, state), master_params(params, state)

    def plain(carry, gradient):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = inner.update(gradient, carry[1], carry[0])
            params = optax.apply_updates(carry[0], updates)
        return (params, state), params

    (params, state), masters = jax.jit(functools.partial(jax.lax.scan, ours))(
        (PARAMS, tx.init(PARAMS)), GRADIENTS
    )
    start = wide(PARAMS)
    _, expected = jax.jit(functools.partial(jax.lax.scan, plain))(
        (start, inner.init(start)), wide(GRADIENTS)
    )
    # the same operations, compiled with a cast in front and without: a few ulps of float32
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), masters, expected
    )
    assert state.count == 12
    assert params["w"].dtype == jnp.bfloat16
    assert not np.array_equal(masters["w"][-1], start["w"])
    if name == "masked":
        np.testing.assert_array_equal(params["b"], PARAMS["b"])


def test_multi_steps_inside_accumulates_half_precision_gradients_in_float32():
    tiny = 2.0**-8  # 1 + 2^-8 is no bfloat16
    tx = mixed_precision(INSIDE["MultiSteps"](), "bfloat16")
    params: Any = {"w": jnp.zeros(2, jnp.bfloat16)}
    state: Any = tx.init(params)
    for value in (1.0, tiny):
        _, state, _ = apply_gradients(tx, params, state, {"w": jnp.full(2, value, jnp.bfloat16)})
    np.testing.assert_array_equal(state.inner.acc_grads["w"], np.float32((1 + tiny) / 2))


def test_an_injected_schedule_keeps_every_float32_value_on_half_precision_params():
    schedule = optax.linear_schedule(1e-3, 0.0, 1000)
    tx = mixed_precision(optax.inject_hyperparams(optax.adam)(schedule), "bfloat16")

    def body(carry, _):
        params, state, _ = apply_gradients(tx, carry[0], carry[1], PARAMS)
        # optax's own way to tell the value from the schedule's state, which has the same name
        get = functools.partial(
            optax.tree.get, state, filtering=lambda _, value: isinstance(value, jax.Array)
        )
        return (params, state), (get("learning_rate"), get("b2"))

    _, (rates, b2) = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), None, length=1000)
    assert rates.dtype == b2.dtype == jnp.float32
    assert len(np.unique(rates)) == 1000  # optax on bfloat16 params has 12
    np.testing.assert_array_equal(b2, np.float32(0.999))  # there it is 1


@pytest.mark.parametrize("holder", ["state", "TrainState"])
def test_hyperparameters_are_set_wherever_the_state_lies_and_masters_stay(holder):
    tx: Any = mixed_precision(
        optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)),
        "bfloat16",
        loss_scale="dynamic",
    )
    train_state: Any = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with jax.numpy_dtype_promotion("standard"):
        train_state = train_state.apply_gradients(grads=wide(PARAMS))
    given = train_state if holder == "TrainState" else train_state.opt_state
    changed: Any = optax.tree.set(given, learning_rate=jnp.float32(0.0), weight_decay=0.0)
    assert optax.tree.get(changed, "learning_rate") == 0
    before, after = (master_params(PARAMS, x) for x in (given, changed))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert jax.tree.structure(changed) == jax.tree.structure(given)
    train_state = changed if holder == "TrainState" else train_state.replace(opt_state=changed)
    with jax.numpy_dtype_promotion("standard"):
        stepped = train_state.apply_gradients(grads=wide(PARAMS))
    jax.tree.map(
        np.testing.assert_array_equal, stepped.params, train_state.params
    )  # a rate of 0 moves nothing
    for name in ("learning_rate", "weight_decay"):
        rate = optax.tree.get(stepped.opt_state, name)
        assert (rate.dtype, jax.typeof(rate).weak_type) == (jnp.float32, False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_train_state_steps_as_apply_gradients_does_and_skips_with_it(dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    tx = mixed_precision(
        optax.adamw(1e-2), "float32", loss_scale=DynamicLossScale(2.0**10, period=2)
    )
    train_state: Any = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = tx.init(params)

    def loss_fn(params, factor):
        return (
            sum(jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(params))
            * factor
        )

    @jax.jit
    def step(train_state, params, state, factor):
        _, grads = value_and_grad(loss_fn, loss_scale=loss_scale_of(train_state))(
            train_state.params, factor
        )
        with jax.numpy_dtype_promotion("standard"):
            train_state = train_state.apply_gradients(grads=grads)
        _, grads = value_and_grad(loss_fn, loss_scale=loss_scale_of(state))(params, factor)
        return train_state, *apply_gradients(tx, params, state, grads)[:2]

    for factor in (1.0, np.nan, 1.0, 1.0):
        before = train_state.params
        train_state, params, state = step(train_state, params, state, factor)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-7),
            wide(train_state.params),
            wide(params),
        )
        assert bool(finite_of(train_state)) == np.isfinite(factor)
        if np.isnan(factor):
            jax.tree.map(np.testing.assert_array_equal, train_state.params, before)
    assert train_state.step == 4  # Flax's own counter goes on; ours does not
    assert train_state.opt_state.count == state.count == 3
    assert loss_scale_of(train_state).loss_scale == loss_scale_of(state).loss_scale == 2.0**10


def test_an_average_of_masters_follows_what_one_of_half_precision_params_loses():
    tx = mixed_precision(optax.sgd(1e-3), "bfloat16")
    params = {"w": jnp.ones(64, jnp.bfloat16)}
    decay = 0.999

    def body(carry, gradient):
        params, state, average, narrow = carry
        params, state, finite = apply_gradients(tx, params, state, {"w": jnp.full(64, gradient)})
        new = optax.incremental_update(master_params(params, state), average, 1 - decay)
        rounded = optax.incremental_update(params, narrow, 1 - decay)
        return (params, state, select_tree(finite, new, average), rounded), master_params(
            params, state
        )["w"][0]

    state = tx.init(params)
    average: Any
    narrow: Any
    gradients = jnp.ones(1000).at[500].set(jnp.nan)  # one step is skipped, and moves no average
    carry: Any = (params, state, master_params(params, state), params)
    with jax.numpy_dtype_promotion("standard"):
        (_, _, average, narrow), masters = jax.lax.scan(body, carry, gradients)
    expected = 1.0
    for step, master in enumerate(np.asarray(masters, np.float64)):
        expected = expected if step == 500 else decay * expected + (1 - decay) * master
    assert average["w"].dtype == jnp.float32
    np.testing.assert_allclose(
        average["w"], expected, rtol=1000 * 2.0**-24
    )  # the decay is rounded to float32
    # bfloat16 keeps an average where it started, wherever a step of it is below half an ulp
    assert expected < 0.7
    np.testing.assert_array_equal(narrow["w"], 1)

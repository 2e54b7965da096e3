"""Schedules inside of `mixed_precision`, averages of masters beside it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy import (
    apply_gradients,
    master_params,
    mixed_precision,
    select_tree,
)

RNG = np.random.default_rng(0)
PARAMS = {
    "b": jnp.asarray(RNG.normal(size=3), jnp.bfloat16),
    "w": jnp.asarray(RNG.normal(size=(2, 3)), jnp.bfloat16),
}


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

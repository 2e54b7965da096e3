"""Mistakes that train on without an error: the warning of each, and the silent neighbours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import (
    DtypePolicyWarning,
    DynamicLossScale,
    NoOpLossScale,
    apply_gradients,
    loss_scale_of,
    mixed_precision,
    value_and_grad,
)
from policy.optim import init_from_master

PARAMS = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}
SCALES: list[Any] = ["dynamic", 1024.0]


def loss_fn(params):
    return sum(jnp.square(p).mean() for p in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_params_under_a_policy_of_half_params_are_told_with_init_from_master(dtype):
    tx = mixed_precision(optax.sgd(0.1), dtype, loss_scale="dynamic")
    told = (
        rf"^params are float32, but the policy .* stores them in {dtype}, "
        r".* params, opt_state = init_from_master\(tx, f32_params\)"
    )
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.warns(DtypePolicyWarning, match=told):
            init(PARAMS)
    params, state = init_from_master(tx, PARAMS)  # what it proposes
    apply_gradients(tx, params, state, params)


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ("mixed_bfloat16", (jnp.float32, jnp.float32)),
        ("params=float32,compute=bfloat16", (jnp.float32, jnp.float32)),
        ("bfloat16", (jnp.float32, jnp.bfloat16)),  # a head that a rule keeps in float32
        ("bfloat16", (jnp.float16, jnp.float32)),
        ("bfloat16", (jnp.complex64, jnp.complex64)),
        ("float32", (jnp.bfloat16, jnp.bfloat16)),
    ],
)
def test_other_params_are_silent(policy, dtypes):
    tx = mixed_precision(optax.sgd(0.1), policy)
    tx.init({"a": jnp.ones(2, dtypes[0]), "b": jnp.ones(2, dtypes[1])})


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "params=bfloat16,compute=float16"])
def test_float16_without_a_loss_scale_is_told_and_gets_none(policy):
    told = (
        r"no loss scale under 'params=.*compute=float16.* Pass loss_scale='dynamic' here "
        r"and loss_scale=loss_scale_"
    )
    with pytest.warns(DtypePolicyWarning, match=told):
        tx = mixed_precision(optax.sgd(0.1), policy)
    assert tx.loss_scale == NoOpLossScale()


def transform(loss_scale: Any) -> Any:
    return mixed_precision(optax.sgd(1e-3), "mixed_float16", loss_scale=loss_scale)


@pytest.mark.parametrize(
    "differentiate", [jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: jax.jit(jax.grad(f))]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("through_optax", [False, True])
@pytest.mark.parametrize("loss_scale", SCALES)
def test_scaled_gradients_in_a_plain_tree_are_told(
    loss_scale, through_optax, compiled, differentiate
):
    tx = transform(loss_scale)

    def train(params: Any, state: Any) -> Any:
        scale = loss_scale_of(state)
        gradients = differentiate(lambda p: scale.scale(loss_fn(p)))(params)
        if through_optax:
            return optax.apply_updates(params, tx.update(gradients, state, params)[0])
        return apply_gradients(tx, params, state, gradients)[0]

    with pytest.warns(
        DtypePolicyWarning,
        match=r"without loss_scale\.unscale\. .* policy\.value_and_grad\(loss_fn, l",
    ):
        new = (jax.jit(train) if compiled else train)(PARAMS, tx.init(PARAMS))
    assert abs(new["a"][0] - 1) > 0.5  # the true step is 1e-3


@pytest.mark.parametrize("loss_scale", SCALES)
def test_unscaled_ones_and_ours_are_silent(loss_scale):
    tx = transform(loss_scale)

    @jax.jit
    def train(params, state):
        scale = loss_scale_of(state)
        by_hand = scale.unscale(jax.grad(lambda p: scale.scale(loss_fn(p)))(params))
        ours = [
            value_and_grad(loss_fn, loss_scale=scale, grads=kind)(params)[1]
            for kind in ("float32", "compute")
        ]
        return [apply_gradients(tx, params, state, gradients)[0] for gradients in (by_hand, *ours)]

    new = train(PARAMS, tx.init(PARAMS))
    for params in new:
        np.testing.assert_allclose(params["a"], 0.999, rtol=1e-6)


def test_a_loss_that_is_only_looked_at_and_another_scale_are_silent():
    tx = transform("dynamic")
    state = tx.init(PARAMS)
    gradients = jax.grad(loss_fn)(PARAMS)
    loss_scale_of(state).scale(loss_fn(PARAMS))  # not traced
    loss_scale_of(state).scale(gradients)  # no loss
    jax.grad(lambda p: DynamicLossScale(8.0).scale(loss_fn(p)))(PARAMS)  # not the optimizer's
    tx.update(gradients, state, PARAMS)

"""Mistakes that train on without an error: the warning of each, and the silent neighbors."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

import policy.grads.loss_scale
from mpmodules import nnx
from policy import (
    DtypePolicyWarning,
    DynamicLossScale,
    NoOpLossScale,
    accumulate_gradients,
    apply_gradients,
    grad,
    init_from_master,
    loss_scale_of,
    mixed_precision,
    value_and_grad,
)
from policy.grads import ScaledGradients
from tests.policy.optim.steps import BOTH_WAYS, stepped

PARAMS = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}
SCALES: list[Any] = ["dynamic", 1024.0]
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def loss_fn(params: Any) -> Any:
    return sum(jnp.square(p).mean() for p in jax.tree.leaves(params))


def transform(loss_scale: Any = "dynamic", policy: str = "mixed_float16") -> Any:
    return mixed_precision(optax.sgd(1e-3), policy, loss_scale=loss_scale)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_params_under_a_policy_of_half_params_are_told_with_init_from_master(dtype):
    tx = transform(policy=dtype)
    told = (
        rf"^params are float32, but the policy .* stores them in {dtype}, "
        r".* params, opt_state = init_from_master\(tx, f32_params\)"
    )
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.warns(DtypePolicyWarning, match=told):
            init(PARAMS)
    params, state = init_from_master(tx, PARAMS)  # what it proposes
    apply_gradients(tx, params, state, params)


@pytest.mark.cases(fast=5)
@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ("mixed_bfloat16", (F32, F32)),
        ("params=float32,compute=bfloat16", (F32, F32)),
        ("bfloat16", (F32, BF16)),  # a head that a rule keeps in float32
        ("bfloat16", (F16, F32)),
        ("bfloat16", (jnp.complex64, jnp.complex64)),
        ("float32", (BF16, BF16)),
    ],
)
def test_other_params_are_silent(policy, dtypes):
    tx = transform(None, policy)
    tx.init({"a": jnp.ones(2, dtypes[0]), "b": jnp.ones(2, dtypes[1])})


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "params=bfloat16,compute=float16"])
def test_float16_without_a_loss_scale_is_told_and_gets_none(policy):
    told = (
        r"no loss scale under 'params=.*compute=float16.* Pass loss_scale='dynamic' here "
        r"and loss_scale=loss_scale_"
    )
    with pytest.warns(DtypePolicyWarning, match=told):
        tx = transform(None, policy)
    assert tx.loss_scale == NoOpLossScale()


@pytest.mark.cases(fast=1, slow=7)
@pytest.mark.parametrize(
    "differentiate", [jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: jax.jit(jax.grad(f))]
)
@pytest.mark.parametrize("under", [lambda train: train, jax.jit])
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
@pytest.mark.parametrize("loss_scale", SCALES)
def test_scaled_gradients_in_a_plain_tree_are_told(loss_scale, through_optax, under, differentiate):
    tx = transform(loss_scale)

    @under
    def train(params: Any, state: Any) -> Any:
        scale = loss_scale_of(state)
        gradients = differentiate(lambda p: scale.scale(loss_fn(p)))(params)
        return stepped(tx, params, state, gradients, through_optax)[0]

    told = r"without loss_scale\.unscale\. .* policy\.value_and_grad\(loss_fn, l"
    with pytest.warns(DtypePolicyWarning, match=told):
        new = train(PARAMS, tx.init(PARAMS))
    assert abs(new["a"][0] - 1) > 0.5  # the true step is 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", SCALES)
def test_unscaled_ones_and_ours_are_silent(loss_scale):
    tx = transform(loss_scale)

    def train(params, state):
        scale = loss_scale_of(state)
        by_hand = scale.unscale(jax.grad(lambda p: scale.scale(loss_fn(p)))(params))
        ours = [grad(loss_fn, loss_scale=scale, grads=kind)(params) for kind in KINDS]
        ways = itertools.product((by_hand, *ours), BOTH_WAYS)
        return [stepped(tx, params, state, gradients, way)[0] for gradients, way in ways]

    for run in (train, jax.jit(train)):
        for params in run(PARAMS, tx.init(PARAMS)):
            np.testing.assert_allclose(params["a"], 0.999, rtol=1e-6)


KINDS: Any = ("float32", "compute")


@pytest.mark.slow
def test_a_loss_that_is_only_looked_at_another_scale_and_no_scale_are_silent():
    tx = transform()
    state = tx.init(PARAMS)
    gradients = jax.grad(loss_fn)(PARAMS)
    loss_scale_of(state).scale(loss_fn(PARAMS))  # not traced
    loss_scale_of(state).scale(gradients)  # no loss
    jax.grad(lambda p: DynamicLossScale(8.0).scale(loss_fn(p)))(PARAMS)  # not the optimizer's
    tx.update(gradients, state, PARAMS)
    plain = transform(None, "mixed_bfloat16")
    plain.update(grad(loss_fn)(PARAMS), plain.init(PARAMS), PARAMS)


TOLD = r"has a loss scale.*loss_scale=loss_scale_of\(opt_state\)"


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("loss_scale", SCALES)
@pytest.mark.parametrize("under", [lambda step: step, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
def test_gradients_of_an_unscaled_loss_are_told(through_optax, under, loss_scale):
    tx = transform(loss_scale)

    @under
    def step(params: Any, state: Any) -> Any:
        return stepped(tx, params, state, value_and_grad(loss_fn)(params)[1], through_optax)[1]

    with pytest.warns(DtypePolicyWarning, match=TOLD):
        step(PARAMS, tx.init(PARAMS))


def of_flax(model: Any) -> Any:
    return flax_nnx.grad(lambda model: model(jnp.ones((1, 3))).sum())(model)


@pytest.fixture
def no_scale_so_far(monkeypatch):
    monkeypatch.setattr(policy.grads.loss_scale, "_is_any_used", False)


ELSEWHERE: dict[str, Any] = {
    "jax.grad": jax.grad(loss_fn),
    "a function of gradients": lambda p: jax.tree.map(lambda g: g / 2, grad(loss_fn)(p)),
    "microbatches": lambda p: accumulate_gradients(
        value_and_grad(lambda p, _: loss_fn(p)), p, jnp.ones((2, 1))
    )[1],
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("way", ELSEWHERE)
def test_gradients_that_others_computed_before_any_scale_was_used_are_told(way, no_scale_so_far):
    tx = transform()
    step = jax.jit(lambda p, s: apply_gradients(tx, p, s, ELSEWHERE[way](p)))
    with pytest.warns(DtypePolicyWarning, match=TOLD):
        step(PARAMS, tx.init(PARAMS))
    # A loss that is scaled by the number, and gradients of another program that were scaled.
    state = tx.init(PARAMS)
    assert jnp.asarray(loss_scale_of(state).loss_scale) > 1  # read, to scale by hand
    step(PARAMS, state)
    jax.jit(lambda p, s: apply_gradients(tx, p, s, ELSEWHERE[way](p)))(PARAMS, state)


def test_gradients_of_flax_s_transform_are_told_in_an_nnx_step(no_scale_so_far):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), dtype_policy="mixed_float16")
    optimizer = nnx.Optimizer(model, transform(), wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, of_flax(model)))
    with pytest.warns(DtypePolicyWarning, match=TOLD):
        step(model, optimizer)


def test_gradients_that_carry_the_scale_of_a_loss_scaled_by_hand_are_silent():
    tx = transform()
    state = tx.init(PARAMS)
    scale = loss_scale_of(state)
    scaled = jax.grad(lambda p: scale.scale(loss_fn(p)))(PARAMS)
    new, _, finite = apply_gradients(tx, PARAMS, state, ScaledGradients(scaled, scale.loss_scale))
    np.testing.assert_allclose(new["a"], 0.999, rtol=1e-6)
    assert finite

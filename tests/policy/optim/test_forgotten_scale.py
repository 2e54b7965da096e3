"""A loss scale that the gradients were computed without is told, once."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from mpmodules import nnx
from policy import (
    DtypePolicyWarning,
    apply_gradients,
    grad,
    loss_scale_of,
    mixed_precision,
    value_and_grad,
)

P = {"w": jnp.ones(3)}
TOLD = r"has a loss scale.*loss_scale=loss_scale_of\(opt_state\)"
scales = pytest.mark.parametrize("loss_scale", ["dynamic", 1024.0])


def loss_fn(params: Any) -> jax.Array:
    return jnp.sum(jnp.square(params["w"]))


def transform(loss_scale: Any = "dynamic") -> Any:
    return mixed_precision(optax.adam(1e-3), "mixed_float16", loss_scale=loss_scale)


@scales
@pytest.mark.parametrize("under", [lambda step: step, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("through", ["apply_gradients", "update"])
def test_gradients_of_an_unscaled_loss_are_told(through, under, loss_scale):
    tx = transform(loss_scale)

    @under
    def step(params: Any, state: Any) -> Any:
        _, gradients = value_and_grad(loss_fn)(params)
        if through == "update":
            return tx.update(gradients, state, params)[1]
        return apply_gradients(tx, params, state, gradients)[1]

    with pytest.warns(DtypePolicyWarning, match=TOLD):
        step(P, tx.init(P))


@scales
def test_scaled_gradients_and_those_of_other_functions_are_not(loss_scale):
    tx = transform(loss_scale)
    state = tx.init(P)
    scale = loss_scale_of(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradients in (
            grad(loss_fn, loss_scale=scale)(P),
            grad(loss_fn, loss_scale=scale, grads="compute", policy="mixed_float16")(P),
            jax.grad(loss_fn)(P),
        ):
            tx.update(gradients, state, P)
        plain = mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
        plain.update(grad(loss_fn)(P), plain.init(P), P)


def test_an_nnx_optimizer_tells_it_too():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), dtype_policy="mixed_float16")
    optimizer = nnx.Optimizer(model, transform(), wrt=nnx.Param)
    gradients = nnx.grad(lambda model: model(jnp.ones((1, 3))).sum())(model)
    with pytest.warns(DtypePolicyWarning, match=TOLD):
        optimizer.update(model, gradients)

"""`nnx.Optimizer` around `mixed_precision`: hyperparameters, averages of masters, resync, without glue."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import apply_gradients, finite_of, loss_scale_of, master_params, mixed_precision, resync
from policy.optim.rounding import round_to

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def loss_fn(model, x):
    return jnp.square(model(x).astype(jnp.float32) - 1).mean()


def parts(param_dtype, learning_rate=0.05) -> Any:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=param_dtype, dtype=jnp.float32)
    tx = mixed_precision(
        optax.inject_hyperparams(optax.adamw)(learning_rate=learning_rate), "mixed_bfloat16", loss_scale="dynamic"
    )
    return model, tx, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
    _, gradients = nnx.value_and_grad(loss_fn, loss_scale=loss_scale_of(optimizer))(model, X)
    with jax.numpy_dtype_promotion("standard"):  # optax.apply_updates adds float32 updates to half-precision params
        optimizer.update(model, gradients)


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("param_dtype", DTYPES)
def test_it_steps_as_apply_gradients_does(param_dtype):
    model, tx, optimizer = parts(param_dtype)
    graphdef, params = flax_nnx.split(parts(param_dtype)[0])
    state = tx.init(params)

    @jax.jit
    def by_hand(params, state):
        model = flax_nnx.merge(graphdef, params)
        gradients = nnx.grad(loss_fn, loss_scale=loss_scale_of(state))(model, X)
        return apply_gradients(tx, params, state, gradients)[:2]

    for _ in range(4):
        step(model, optimizer)
        params, state = by_hand(params, state)
    pairs = [
        (nnx.state(model, nnx.Param), params),
        (master_params(nnx.state(model, nnx.Param), optimizer), master_params(params, state)),
    ]
    for ours, expected in pairs:
        for a, b in zip(values(ours), values(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("param_dtype", DTYPES)
def test_masters_are_read_with_the_models_own_state(param_dtype):
    model, _, optimizer = parts(param_dtype)
    step(model, optimizer)
    params = nnx.state(model, nnx.Param)
    for holder in (optimizer, optimizer.opt_state):
        masters = master_params(params, holder)
        assert jax.tree.structure(masters) == jax.tree.structure(params)  # Params: nnx.update takes them
        assert {leaf.dtype for leaf in values(masters)} == {np.dtype("float32")}
        for master, param in zip(values(masters), values(params), strict=True):
            np.testing.assert_array_equal(round_to(jnp.asarray(master), param_dtype), param)
    average = optax.incremental_update(masters, jax.tree.map(jnp.zeros_like, masters), 0.5)
    for half, master in zip(values(average), values(masters), strict=True):
        np.testing.assert_array_equal(half, master / 2)


def test_hyperparameters_are_read_and_set_in_float32_and_masters_stay():
    model, _, optimizer = parts(jnp.bfloat16)
    step(model, optimizer)
    rate = optax.tree.get(optimizer.opt_state, "learning_rate")
    assert rate[...] == np.float32(0.05)
    before = values(optimizer.opt_state.masters)
    rate[...] = jnp.float32(0.0)  # in place: it is a Variable
    for a, b in zip(values(optimizer.opt_state.masters), before, strict=True):
        np.testing.assert_array_equal(a, b)
    optimizer.opt_state = optax.tree.set(optimizer.opt_state, weight_decay=jnp.float32(0.0))
    masters = values(master_params(nnx.state(model, nnx.Param), optimizer))
    step(model, optimizer)
    for a, b in zip(values(master_params(nnx.state(model, nnx.Param), optimizer)), masters, strict=True):
        np.testing.assert_array_equal(a, b)  # a rate of 0
    assert optax.tree.get(optimizer.opt_state, "learning_rate").dtype == jnp.float32


@pytest.mark.parametrize("param_dtype", DTYPES)
def test_resync_follows_what_was_written_to_the_model(param_dtype):
    model, _, optimizer = parts(param_dtype)
    step(model, optimizer)
    model.kernel[...] = jnp.full((3, 2), 0.25, param_dtype)
    structure = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = resync(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert jax.tree.structure(optimizer.opt_state) == structure
    np.testing.assert_array_equal(master_params(nnx.state(model, nnx.Param), optimizer)["kernel"][...], 0.25)
    step(model, optimizer)
    assert finite_of(optimizer)
    assert not (np.asarray(model.kernel[...], np.float32) == 0.25).any()


def test_params_of_another_tree_are_refused_by_name():
    _, _, optimizer = parts(jnp.bfloat16)
    other = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"params should be the tree .*, but got another, with 1 leaves: kernel"):
        master_params(nnx.state(other, nnx.Param), optimizer)


def test_multi_steps_goes_inside():
    model, _, _ = parts(jnp.bfloat16)
    multi: Any = optax.MultiSteps(optax.sgd(0.1), 2)
    optimizer: Any = nnx.Optimizer(model, mixed_precision(multi, "bfloat16"), wrt=nnx.Param)
    before = values(nnx.state(model, nnx.Param))
    for expected_to_move in (False, True):
        step(model, optimizer)
        after = values(nnx.state(model, nnx.Param))
        assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True)) != expected_to_move

"""Monitored steps of the ways in which people train, with donation, and inside of `jit`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpmodules
import policy
from policy.inspect.runs.advice import advise
from tests.policy.inspect.monitor.test_monitor import rows_of

assert mpmodules  # modules of flax.nnx are held
EVERY = (5, 100)
X = jax.random.normal(jax.random.key(3), (12, 8))


@pytest.fixture(autouse=True)
def _promotion_of_optax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def weights(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"up": jax.random.normal(keys[0], (8, 8)), "head": jax.random.normal(keys[1], (8, 2))}


def loss_of(params, x):
    with jax.named_scope("head"):
        return jnp.mean((x @ params["up"] @ params["head"]) ** 2)


OPTIMIZERS: dict[str, Any] = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.constant_schedule(1e-2))),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 5),
    "reduce_on_plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
    "frozen": optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        {"up": "freeze", "head": "train"},
    ),
}


def step_of(tx):
    def step(params, opt_state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        more = {"value": loss} if isinstance(tx, optax.GradientTransformationExtraArgs) else {}
        updates, opt_state = tx.update(gradients, opt_state, params, **more)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def run(step, state, *, every, inside, steps=7, bad=None, x=X):
    """Trains by ``step(*state, x)``, with its state donated; returns the state and the records."""
    donated = tuple(range(len(state)))
    if inside:
        donated = tuple(i + 1 for i in donated)
        watched = jax.jit(policy.monitor(step, every=every), donate_argnums=donated)
    else:
        jit = functools.partial(jax.jit, donate_argnums=donated)
        watched = policy.monitor(step, every=every, jit=jit)
    records = []
    state = jax.tree.map(jnp.copy, state)
    for i in range(steps):
        batch = x if i != bad else x.at[3].set(3e38)
        out, snapshot = watched(i, *state, batch)
        state = out[: len(state)]
        records += snapshot.records()
    return state, records


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_alone_and_has_its_rows(name, every, inside):
    tx = OPTIMIZERS[name]
    step, state = step_of(tx), (weights(), tx.init(weights()))
    found, records = run(step, state, every=every, inside=inside)
    for _ in range(7):
        *state, _ = jax.jit(step)(*state, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, tuple(state))
    assert [one["step"] for one in records] == ([0, 5] if every == 5 else [0])
    for record in records:
        rows = {path for path, kind in rows_of(record) if kind in ("param", "update")}
        assert rows == {"up", "head"} and record["first"] is None
        assert {path for path, kind in rows_of(record) if kind == "input"} == {"x"}
    assert advise(records) == ()


@pytest.mark.parametrize("inside", [False, True])
def test_a_step_between_records_is_named_and_the_state_is_its_own(inside):
    tx = OPTIMIZERS["reduce_on_plateau"]
    state = weights(), tx.init(weights())
    found, records = run(step_of(tx), state, every=100, inside=inside, bad=3, steps=5)
    assert [one["step"] for one in records] == [0, 3, 4]
    first: Any = records[1]["first"]
    assert (first["path"], first["operation"]) == ("head", "dot_general")
    assert first["line"].startswith("test_ways_to_train.py:")
    for i in range(5):
        *state, _ = jax.jit(step_of(tx))(*state, X if i != 3 else X.at[3].set(3e38))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, tuple(state))
    assert {one.step for one in advise(records)} == {3}


def test_multi_steps_whose_length_divides_every_have_updates_between_records():
    tx = optax.MultiSteps(optax.sgd(1e-2), 2)
    state = weights(), tx.init(weights())
    _, records = run(step_of(tx), state, every=2, inside=False, steps=24)
    assert len(records) == 12 and advise(records) == ()


def test_a_train_state_and_states_of_other_names():
    tx = optax.adam(1e-2)
    state = TrainState.create(apply_fn=loss_of, params=weights(), tx=tx)

    def of_flax(state, x):
        loss, gradients = jax.value_and_grad(state.apply_fn)(state.params, x)
        return state.apply_gradients(grads=gradients), {"loss": loss}

    own = {"theta": weights(), "slots": tx.init(weights()), "average": weights()}

    def of_ours(state, x):
        loss, gradients = jax.value_and_grad(loss_of)(state["theta"], x)
        updates, slots = tx.update(gradients, state["slots"])
        theta = optax.apply_updates(state["theta"], updates)
        average = optax.incremental_update(theta, state["average"], 0.1)
        return {"theta": theta, "slots": slots, "average": average}, loss

    for step, given, name in ((of_flax, state, "params"), (of_ours, own, "theta")):
        _, records = run(step, (given,), every=5, inside=False)
        rows = {path for path, kind in rows_of(records[0]) if kind in ("param", "gradient")}
        assert rows == {f"{name}/up", f"{name}/head"} and len(records) == 2


def test_two_models_in_one_step_have_rows_of_their_own():
    tx = optax.adam(1e-2)

    def step(generator, critic, states, x):
        of_generator = jax.grad(lambda g: loss_of(critic, jnp.tanh(x @ g["up"])))(generator)
        loss, of_critic = jax.value_and_grad(loss_of)(critic, x @ generator["up"])
        new = []
        for params, gradients, state in zip(
            (generator, critic), (of_generator, of_critic), states, strict=True
        ):
            updates, state = tx.update(gradients, state)
            new.append((optax.apply_updates(params, updates), state))
        return new[0][0], new[1][0], (new[0][1], new[1][1]), loss

    both = weights(0), weights(1)
    state = (*both, tuple(map(tx.init, both)))
    _, records = run(step, state, every=5, inside=False)
    rows = rows_of(records[0])
    for name, params in zip(("generator", "critic"), both, strict=True):
        numbers = rows[f"{name}/up", "param"]["numbers"]
        np.testing.assert_allclose(numbers["largest"], np.abs(params["up"]).max(), rtol=1e-6)
    assert {path for path, kind in rows if kind == "gradient"} >= {"generator/up", "critic/head"}


def test_low_rank_factors_are_the_params_of_a_frozen_model():
    tx = optax.adam(1e-2)

    def step(base, factors, opt_state, x):
        def of(factors):
            return loss_of(base | {"up": base["up"] + factors["a"] @ factors["b"]}, x)

        loss, gradients = jax.value_and_grad(of)(factors)
        updates, opt_state = tx.update(gradients, opt_state)
        return base, optax.apply_updates(factors, updates), opt_state, loss

    factors = {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 8))}
    _, records = run(step, (weights(), factors, tx.init(factors)), every=5, inside=False)
    assert {path for path, kind in rows_of(records[0]) if kind == "update"} == {"a", "b"}


@pytest.mark.parametrize("inside", [False, True])
def test_infinite_masks_and_missing_values_do_not_hide_an_overflow(inside):
    tx = optax.adam(1e-2)

    def step(params, opt_state, best_loss, x, mask, targets):
        def of(params):
            with jax.named_scope("up"):
                scores = x @ params["up"] + mask
            h = jax.nn.softmax(scores) @ params["head"]
            missing = jnp.isnan(targets)
            return jnp.mean(jnp.where(missing, 0, h - jnp.where(missing, 0, targets)) ** 2)

        loss, gradients = jax.value_and_grad(of)(params)
        updates, opt_state = tx.update(gradients, opt_state)
        best = jnp.minimum(best_loss["value"], loss)
        return optax.apply_updates(params, updates), opt_state, {"value": best}, loss

    mask = jnp.where(jnp.arange(8) < 5, 0.0, -jnp.inf)
    targets = jnp.full((12, 2), jnp.nan).at[::2].set(1.0)

    def with_mask(params, opt_state, best_loss, x):
        return step(params, opt_state, best_loss, x, mask, targets)

    state = weights(), tx.init(weights()), {"value": jnp.float32(jnp.inf)}
    _, records = run(with_mask, state, every=5, inside=inside, bad=3, x=X)
    assert next(one["step"] for one in records if one["outputs"]) == 3
    (found, *_) = advise(records)
    assert (found.step, found.path) == (3, "up"), found
    clean = run(with_mask, state, every=5, inside=inside)[1]
    assert advise(clean) == () and all(one["first"] is None for one in clean)


def test_scanned_and_rematerialized_nnx_layers_have_rows():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs)

        def __call__(self, x):
            body = nnx.remat(lambda h, layer: layer(h))
            return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    _, snapshot = policy.monitor(step, every=5, jit=nnx.jit)(0, model, optimizer, X)
    record: Any = snapshot.record()
    for kind in ("gradient", "param", "update"):
        rows = {path for path, one in rows_of(record) if one == kind}
        assert rows == {"layers/linear/bias", "layers/linear/kernel"}
    assert len(rows_of(record)["layers/linear", "activation"]["numbers"]["largest"]) == 3


def test_the_devices_of_a_pmap_have_one_record():
    def step(params, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        gradients = jax.lax.pmean(gradients, "devices")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    jit = functools.partial(jax.pmap, axis_name="devices")
    count = jax.local_device_count()
    params = jax.tree.map(lambda x: jnp.stack([x] * count), weights())
    watched, batch = policy.monitor(step, every=5, jit=jit), jnp.stack([X] * count)
    records = []
    for i in range(7):
        (params, _), snapshot = watched(i, params, batch if i != 3 else batch * 1e38)
        records += snapshot.records()
    assert [one["step"] for one in records[:2]] == [0, 3] and records[1]["first"]
    np.testing.assert_allclose(
        rows_of(records[0])["up", "param"]["numbers"]["largest"], np.abs(weights()["up"]).max()
    )

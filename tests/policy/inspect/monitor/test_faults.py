"""Faults of a run whose steps are recorded rarely are named; the remedies that advice has help."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy
from policy.inspect.runs.advice import advise
from tests.policy.inspect.monitor.test_ways_to_train import X, loss_of, weights

pytestmark = pytest.mark.filterwarnings("ignore:mixed_precision has no loss scale")
BATCHES = [X] * 16


@pytest.fixture(autouse=True)
def _promotion_of_optax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def records_of(step, state, batches, *, every=100, inside=False):
    """Trains by ``step(*state, x)``, which returns the state and a loss or metrics."""
    donated = tuple(i + inside for i in range(len(state)))
    jit: Any = functools.partial(jax.jit, donate_argnums=donated)
    watched = policy.monitor(step, every=every, jit=None if inside else jit)
    watched = jit(watched) if inside else watched
    state, records = jax.tree.map(jnp.copy, state), []
    for i, x in enumerate(batches):
        out, snapshot = watched(i, *state, x)
        state = out[: len(state)]
        records += snapshot.records()
    return records


def with_bad(step, value, index=(3, 0)):
    return [x.at[index].set(value) if i == step else x for i, x in enumerate(BATCHES)]


def sgd(loss_fn, rate=1e-3):
    def step(params, x):
        loss, gradients = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), loss

    return step


@pytest.mark.parametrize("inside", [False, True])
def test_a_nan_gradient_under_a_finite_loss_is_named_at_its_step(inside):
    def root(params, x):
        with jax.named_scope("root"):
            return jnp.sqrt(jnp.sum((x @ params["up"]) ** 2))

    data = [jnp.zeros_like(X) if i == 7 else X for i in range(12)]
    records = records_of(sgd(root), (weights(),), data, inside=inside)
    (found,) = advise(records)
    assert (found.kind, found.path, found.step) == ("division-by-zero", "root", 7)
    assert found.line.startswith("test_faults.py:")


def test_of_two_models_in_a_step_an_infinite_input_is_the_cause_and_lost_updates_are_finite():
    """A cross-entropy compares with constants of infinity, which it does not compute with."""
    entropy = optax.sigmoid_binary_cross_entropy

    def step(critic, maker, x):
        def critic_loss(critic):
            real, fake = x @ critic["w"], (x[::-1] * maker["w"]) @ critic["w"]
            return jnp.mean(entropy(real, jnp.ones(8)) + entropy(fake, jnp.zeros(8)))

        def maker_loss(maker):
            return jnp.mean(entropy((x * maker["w"]) @ critic["w"], jnp.ones(8)))

        losses, gradients = [], []
        for loss_fn, params in ((critic_loss, critic), (maker_loss, maker)):
            loss, gradient = jax.value_and_grad(loss_fn)(params)
            losses.append(loss)
            gradients.append(gradient)
        new = [
            jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient)
            for params, gradient in zip((critic, maker), gradients, strict=True)
        ]
        return *new, losses

    width = X.shape[1]
    state = {"w": jnp.ones(width)}, {"w": jnp.ones(width)}
    data = [x[:8] for x in with_bad(7, jnp.inf)]
    records = records_of(step, state, data, every=5)
    (found,) = advise(records)
    assert (found.kind, found.path, found.step) == ("input-not-finite", "x", 7)
    updates = [row for row in records[-1]["rows"] if row["kind"] == "update"]
    assert {row["path"] for row in updates} == {"critic/w", "maker/w"}
    assert all(row["numbers"]["nan"] == 1 and row["numbers"]["lost"] == 0 for row in updates)


@pytest.mark.parametrize("constant", [np.float32(np.inf), np.array([1, np.inf], np.float32)])
def test_a_loss_that_is_infinite_in_every_step_by_a_constant_is_named(constant):
    def loss_fn(params, x):
        with jax.named_scope("penalty"):
            return jnp.sum(loss_of(params, x) + constant)

    (found,) = advise(records_of(sgd(loss_fn), (weights(),), BATCHES, every=5))
    assert (found.kind, found.path) == ("not-finite", "penalty")
    assert (found.step, found.until) == (0, 15)
    assert "add of an infinite constant (forward) in float32 is infinite." in found.message


def test_a_clip_whose_norm_overflows_is_why_no_param_changes():
    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((x @ p["up"]) ** 2))(params)
        with jax.named_scope("clip"):
            square = sum(jnp.sum(g.astype(jnp.float16) ** 2) for g in gradients.values())
            scale = 1 / jnp.sqrt(square)
        new = jax.tree.map(lambda p, g: p - scale * g.astype(jnp.float16), params, gradients)
        return new, loss.astype(jnp.float32)

    params = {"up": weights()["up"].astype(jnp.float16)}
    data = [20 * x.astype(jnp.float16) for x in BATCHES]
    (found,) = advise(records_of(step, (params,), data, every=1))
    assert (found.kind, found.path) == ("no-updates", "clip") and "infinite" not in found.message
    assert "is inf." in found.message and found.line.startswith("test_faults.py:")


def test_state_that_overflows_is_named():
    tx = optax.adam(1e-2)

    def step(params, opt_state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    data = with_bad(6, 1e18)
    (found, *_) = advise(records_of(step, (weights(), tx.init(weights())), data))
    assert found.step == 6 and found.kind == "overflow" and found.path in ("up", "head")


def test_a_negative_variance_of_running_statistics_is_named():
    def step(params, statistics, x):
        def of(params):
            with jax.named_scope("norm"):
                return jnp.mean(((x @ params["up"]) * jax.lax.rsqrt(statistics["var"])) ** 2)

        loss, gradients = jax.value_and_grad(of)(params)
        var = statistics["var"] - 0.3
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients), {"var": var}, loss

    (found, *_) = advise(records_of(step, (weights(), {"var": jnp.ones(8)}), BATCHES))
    assert (found.kind, found.path, found.step) == ("division-by-zero", "norm", 4)
    assert "an operand is negative" in found.message


def test_a_cast_to_8_bits_beyond_its_range_is_named():
    def loss_fn(params, x):
        with jax.named_scope("head"):
            h = (x @ params["up"]).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return jnp.mean(h**2)

    (found, *_) = advise(records_of(sgd(loss_fn), (weights(),), with_bad(4, 1e4)))
    assert (found.kind, found.path, found.step) == ("overflow", "head", 4)
    assert "exceeds 448" in found.message


@pytest.mark.parametrize("inside", [False, True])
def test_a_metric_that_is_nan_is_named_and_steps_are_taken_once(inside):
    def step(state, x):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
        with jax.named_scope("accuracy"):
            metric = jnp.sum(x > 1e9) / jnp.sum(x > 1e9).astype(jnp.float32)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, state["params"], gradients)
        return {"params": new, "count": state["count"] + 1}, {"loss": loss, "accuracy": metric}

    def checked(state, x):
        return step(state, x)

    state = {"params": weights(), "count": jnp.int32(0)}
    watched = policy.monitor(checked, every=5, jit=functools.partial(jax.jit, donate_argnums=0))
    state, records = jax.tree.map(jnp.copy, state), []
    for i, x in enumerate(BATCHES):
        (state, _), snapshot = watched(i, state, x)
        records += snapshot.records()
    assert int(state["count"]) == len(BATCHES)
    (found,) = advise(records)
    assert (found.path, found.kind) == ("accuracy", "division-by-zero")


# --------------------------------------------------------------------------------------------------
# Remedies
# --------------------------------------------------------------------------------------------------


def trained(tx, dtype, scale=1.0, every=1):
    """Returns the records of params of a dtype under a plain or a mixed-precision optimizer."""
    params = jax.tree.map(lambda p: p.astype(dtype), weights())

    def step(params, opt_state, x):
        loss_fn = lambda p: scale * loss_of(p, x.astype(dtype)).astype(jnp.float32)  # noqa: E731
        if isinstance(opt_state, policy.optim.MixedPrecisionState):
            factor = policy.loss_scale_of(opt_state)
            loss, gradients = policy.value_and_grad(loss_fn, loss_scale=factor)(params)
            params, opt_state, _ = policy.apply_gradients(tx, params, opt_state, gradients)
            return params, opt_state, loss
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return records_of(step, (params, tx.init(params)), BATCHES, every=every)


def test_master_weights_keep_updates_that_round_away():
    found = advise(trained(optax.sgd(1e-5), "bfloat16"))
    assert {one.kind for one in found} == {"vanished-updates"}
    assert all('master_weights="auto"' in one.message for one in found)
    tx = policy.mixed_precision(optax.sgd(1e-5), "bfloat16", master_weights="auto")
    assert advise(trained(tx, "bfloat16")) == ()
    assert advise(trained(optax.sgd(1e-5), "float32")) == ()


def test_a_loss_scale_lifts_gradients_that_are_subnormal():
    found = advise(trained(optax.sgd(1e-2), "float16", scale=1e-6))
    assert "underflow" in {one.kind for one in found}
    assert any('loss_scale="dynamic"' in one.message for one in found)
    tx = policy.mixed_precision(optax.sgd(1e-2), "float16", loss_scale="dynamic")
    assert advise(trained(tx, "float16", scale=1e-6)) == ()
    assert advise(trained(optax.sgd(1e-2), "bfloat16", scale=1e-6)) != found


def test_a_dynamic_scale_ends_overflows_at_a_constant_one():
    tx = policy.mixed_precision(optax.sgd(1e-6), "float16", loss_scale=2.0**16)
    found = advise(trained(tx, "float16", scale=100.0))
    assert [one.kind for one in found] == ["loss-scale"]
    assert 'loss_scale="dynamic" halves it' in found[0].message
    tx = policy.mixed_precision(optax.sgd(1e-6), "float16", loss_scale="dynamic")
    assert advise(trained(tx, "float16", scale=100.0)) == ()


def test_bfloat16_holds_what_exceeds_float16():
    def loss_in(dtype):
        def loss_fn(params, x):
            with jax.named_scope("up"):
                h = (100 * x.astype(dtype)) @ params["up"].astype(dtype)
            return jnp.mean(h.astype(jnp.float32)) ** 2

        return loss_fn

    data = [10 * x for x in with_bad(5, 60.0)]
    (found, *_) = advise(records_of(sgd(loss_in("float16"), 0.0), (weights(),), data))
    assert (found.kind, found.path, found.step) == ("overflow", "up", 5)
    assert "mixed_bfloat16" in found.message
    assert advise(records_of(sgd(loss_in("bfloat16"), 0.0), (weights(),), data)) == ()


def test_recording_each_step_that_is_not_finite_names_the_cause_of_params_that_are_nan():
    def root(params, x):
        return jnp.sum(jnp.sqrt(jnp.abs(x @ params["up"])))

    data = [jnp.zeros_like(X) if i == 7 else X for i in range(12)]

    def watched(on_nonfinite):
        step = policy.monitor(sgd(root), every=10, on_nonfinite=on_nonfinite, jit=jax.jit)
        params, records = weights(), []
        for i, x in enumerate(data):
            (params, _), snapshot = step(i, params, x)
            records += snapshot.records()
        return advise(records)

    (found, *_) = watched(False)
    assert (found.kind, found.step) == ("state-not-finite", 10)
    assert "on_nonfinite=True" in found.message
    (found,) = watched(True)
    assert (found.kind, found.step) == ("division-by-zero", 7)

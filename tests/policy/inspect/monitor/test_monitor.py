"""Snapshots of steps of plain JAX, linen and nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy


def sgd(params, x):
    """A step of plain JAX, in two modules."""

    def loss_of(params):
        with jax.named_scope("up"):
            hidden = jnp.tanh(x @ params["up"])
        with jax.named_scope("head"):
            return jnp.mean((hidden @ params["head"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, gradients), loss


def given(dtype="float32"):
    up, head, x = (jax.random.normal(key, (4, 4)) for key in jax.random.split(jax.random.key(0), 3))
    return {"up": up.astype(dtype), "head": head.astype(dtype)}, x


def rows_of(record):
    return {(row["path"], row["kind"]): row for row in record["rows"]}


@pytest.mark.slow
def test_the_result_is_that_of_the_step_and_a_snapshot_is_taken_when_it_is_due():
    params, x = given()
    step = jax.jit(policy.monitor(sgd, every=3))
    taken = []
    for i in range(5):
        (after, loss), snapshot = step(i, params, x)
        jax.tree.map(np.testing.assert_array_equal, (after, loss), jax.jit(sgd)(params, x))
        taken.append((snapshot.record() or {}).get("step"))
        params = after
    assert taken == [0, None, None, 3, None]


@pytest.mark.slow
def test_a_snapshot_of_a_scan_over_steps_has_a_record_for_each_step_that_was_taken():
    params, x = given()

    @jax.jit
    def run(params):
        def body(params, i):
            (params, _), snapshot = policy.monitor(sgd, every=2)(i, params, x)
            return params, snapshot

        return jax.lax.scan(body, params, jnp.arange(5))[1]

    snapshot = run(params)
    assert [record["step"] for record in snapshot.records()] == [0, 2, 4]
    with pytest.raises(ValueError, match="holds 5 steps of a scan: call records"):
        snapshot.record()


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_taken_whatever_every_is():
    params, x = given()
    record = jax.jit(policy.monitor(sgd))(7, params, x.at[1].set(jnp.inf))[1].record()
    assert record["step"] == 7 and record["outputs"]
    assert record["first"]["entered"] == "x"
    step = jax.jit(policy.monitor(sgd, on_nonfinite=False))
    assert step(7, params, x.at[1].set(jnp.inf))[1].record() is None


@pytest.mark.slow
def test_gradients_are_those_that_the_optimizer_reads():
    params, x = given()
    rows = rows_of(policy.monitor(sgd)(0, params, x)[1].record())

    def loss_of(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["head"]) ** 2)

    for name, gradient in jax.grad(loss_of)(params).items():
        numbers = rows[name, "gradient"]["numbers"]
        np.testing.assert_allclose(numbers["mean_square"], np.mean(gradient**2), rtol=1e-5)
        numbers = rows[name, "update"]["numbers"]
        np.testing.assert_allclose(
            numbers["mean_square"], np.mean((0.1 * gradient) ** 2), rtol=1e-5
        )
    assert rows["up", "activation"]["line"].startswith("test_monitor.py:")


def test_integers_and_keys_among_the_arguments_have_no_rows():
    params, x = given()

    def step(params, x, labels, key):
        noise = jax.random.normal(key, x.shape)
        new, loss = sgd({name: params[name] for name in ("up", "head")}, x + noise)
        return {**new, "table": params["table"], "key": params["key"]}, loss, labels

    params |= {"table": jnp.arange(3), "key": jax.random.key(0)}
    args = params, x, jnp.arange(4), jax.random.key(1)
    rows = rows_of(policy.monitor(step)(0, *args)[1].record())
    assert {path for path, kind in rows if kind in ("param", "input")} == {"up", "head", "x"}


def test_functions_that_the_step_jits_are_looked_into():
    params, x = given()
    step = jax.jit(sgd)
    record = jax.jit(policy.monitor(lambda params, x: step(params, x)))(3, params, x * jnp.nan)[1]
    assert record.record()["outputs"]


def test_a_static_loss_scale_and_a_result_like_the_carry_of_a_scan():
    tx = policy.mixed_precision(optax.sgd(0.1), "mixed_float16", loss_scale=1024.0)
    params, x = given()

    def step(params, state, x):
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.mean((x @ params["up"] @ params["head"]) ** 2)
        )(params)
        gradients = jax.tree.map(lambda g: 1024 * g, gradients)
        params, state, _ = policy.apply_gradients(tx, params, state, gradients)
        return (params, state), loss

    record = jax.jit(policy.monitor(step))(0, params, tx.init(params), x)[1].record()
    assert record["loss_scale"] == 1024
    assert {path for path, kind in rows_of(record) if kind == "update"} == {"up", "head"}

"""Snapshots of steps of plain JAX, linen and nnx."""

import jax
import jax.numpy as jnp
import numpy as np
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

"""Snapshots of steps with loops, checkpoints, conditionals, derivative rules and callbacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import policy
from tests.policy.inspect.monitor.test_monitor import rows_of

LAYERS = 4


def stacked(x, w):
    """Returns the results of all layers of a stack, and the last."""

    def layer(h, w):
        with jax.named_scope("block"):
            h = jnp.tanh(h @ w)
        return h, h

    return lax.scan(layer, x, w)


def scanned(params, x, *, remat=False, dtype=jnp.float32):
    """A step of a scanned stack of layers."""
    stack = jax.checkpoint(stacked) if remat else stacked

    def loss_of(params):
        h, _ = stack(x.astype(dtype), params["w"].astype(dtype))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def given():
    w = jax.random.normal(jax.random.key(0), (LAYERS, 8, 8)) / 3
    return {"w": w}, jax.random.normal(jax.random.key(1), (16, 8))


def record_of(step, *args, number=0, **options):
    _, snapshot = jax.jit(policy.monitor(step, **options))(number, *args)
    return snapshot.record()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_scan_have_their_own_numbers(remat):
    params, x = given()
    record = record_of(functools.partial(scanned, remat=remat), params, x)
    row = rows_of(record)["block", "activation"]
    _, results = stacked(x, params["w"])
    assert row["size"] == x.size
    largest, squares = row["numbers"]["largest"], row["numbers"]["mean_square"]
    np.testing.assert_allclose(largest, np.abs(results).max((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(squares, np.square(results).mean((1, 2)), rtol=1e-5)
    cotangents = rows_of(record)["block", "cotangent"]["numbers"]["largest"]
    expected = []
    for i in range(LAYERS):
        rest = params["w"][i:]
        of = jax.grad(lambda h, w: jnp.mean(stacked(h, w)[0] ** 2))
        expected.append(np.abs(of(results[i - 1] if i else x, rest)).max())
    np.testing.assert_allclose(cotangents, expected, rtol=1e-5)
    gradient = rows_of(record)["w", "gradient"]["numbers"]
    whole = jax.grad(lambda w: jnp.mean(stacked(x, w)[0] ** 2))(params["w"])
    np.testing.assert_allclose(gradient["largest"], np.abs(whole).max(), rtol=1e-5)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("layer", [1, 3])
def test_the_first_operation_that_overflows_is_named_with_its_layer(remat, layer):
    params, x = given()
    params["w"] = params["w"].at[layer].mul(1e5)
    record = record_of(functools.partial(scanned, remat=remat, dtype=jnp.float16), params, x)
    first = record["first"]
    assert "w" in record["outputs"]
    where = "" if first["operation"] == "convert_element_type" else "block"
    assert (first["path"], first["direction"]) == (where, "forward")


@jax.custom_vjp
def identity(x, divisor):
    return x


identity.defvjp(lambda x, divisor: (x, divisor), lambda divisor, g: (g / divisor, None))


@pytest.mark.slow
def test_the_backward_pass_of_a_scan_runs_from_the_last_layer():
    params, x = given()

    def layer(h, one):
        w, divisor = one
        with jax.named_scope("block"):
            return identity(jnp.tanh(h @ w), divisor), None

    def step(params, x):
        divisors = jnp.array([0.0, 0.0, 0.0, 1.0])

        def loss_of(params):
            return jnp.mean(lax.scan(layer, x, (params["w"], divisors))[0])

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(jnp.subtract, params, gradients), loss

    first = record_of(step, params, x)["first"]
    assert (first["path"], first["direction"], first["layer"]) == ("block", "backward", 2)
    assert first["operation"] == "div" and first["line"].startswith("test_programs.py:")


@pytest.mark.slow
def test_numbers_of_microbatches_are_of_all_of_them():
    params, x = given()

    def step(params, x):
        def loss_of(params, x):
            with jax.named_scope("head"):
                return jnp.mean((x @ params["w"][0]) ** 2)

        loss, gradients = policy.accumulate_gradients(
            policy.value_and_grad(loss_of), params, policy.split_batch(x, 4)
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    rows = rows_of(record_of(step, params, x))
    gradient = rows["w", "gradient"]["numbers"]
    whole = jax.grad(lambda p: jnp.mean((x @ p["w"][0]) ** 2))(params)["w"]
    # the loop returns their sum
    np.testing.assert_allclose(gradient["largest"], 4 * np.abs(whole).max(), rtol=1e-5)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


@pytest.mark.slow
def test_derivative_rules_conditionals_and_whiles_are_entered():
    params, x = given()

    def step(params, x, flag):
        def loss_of(params):
            with jax.named_scope("first"):
                h = doubled(x @ params["w"][0])
            with jax.named_scope("second"):
                h = lax.cond(flag, lambda h: 3 * h, lambda h: h / 3, h)
            return jnp.mean(h**2)

        def halve(carry):
            with jax.named_scope("halving"):
                return carry[0] / 2, carry[1] + 1

        loss, gradients = jax.value_and_grad(loss_of)(params)
        _, count = lax.while_loop(lambda carry: carry[0] > 1, halve, (loss, 0))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss, count

    for flag in (True, False):
        rows = rows_of(record_of(step, params, x, flag))
        first = np.abs(2 * (x @ params["w"][0])).max()
        largest = rows["first", "activation"]["numbers"]["largest"]
        np.testing.assert_allclose(largest, first, rtol=1e-6)
        largest = rows["second", "activation"]["numbers"]["largest"]
        np.testing.assert_allclose(largest, first * (3 if flag else 1 / 3), rtol=1e-6)
        assert rows["second", "cotangent"]["size"] == x.size


@pytest.mark.slow
def test_effects_happen_once(capfd):
    params, x = given()
    calls = []

    def step(params, x):
        jax.debug.callback(lambda: calls.append(1))
        params, loss = scanned(params, x)
        return params, loss

    record_of(step, params, x)
    jax.effects_barrier()
    assert calls == [1]

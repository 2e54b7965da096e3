"""`grads="accumulator"`: gradients that were never rounded to half precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import policy
from policy import grad, value_and_grad
from policy.eight_bits.scaled_matmul import scaled_dot_general
from tests.programs import named, operations

HALF = jnp.bfloat16
X = np.random.default_rng(0).normal(size=(64, 8)).astype(HALF)
C = np.random.default_rng(1).normal(size=(64, 8)).astype(HALF)  # the cotangent of x @ w
TRUTH = X.astype(np.float64).T @ C.astype(np.float64)


def weighed(y):
    """Returns a loss whose cotangent is `C`, in any half dtype."""
    return jnp.sum(y.astype(jnp.float32) * C.astype(jnp.float32))


def once(w):
    return weighed(X @ w)


def in_a_convolution(w):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(ROWS[:, None], w[None], (1,), "VALID", dimension_numbers=numbers)
    return weighed(y[:, 0])


ROWS = jnp.asarray(X)
USES = {
    "once": once,
    "in jit": lambda w: weighed(jax.jit(jnp.matmul)(X, w)),
    "in a checkpoint": lambda w: weighed(jax.checkpoint(jnp.matmul)(X, w)),
    "in both branches": lambda w: weighed(
        lax.cond(X[0, 0] < 100, lambda w: X @ w, lambda w: -(X @ w), w)
    ),
    "transposed": lambda w: weighed((w.T @ X.T).T),
    "in parts": lambda w: weighed(jnp.concatenate([X @ w[:, :3], X @ w[:, 3:]], axis=1)),
    "in a loop, for each of four slices of the batch": lambda w: weighed(
        lax.map(lambda rows: rows @ w, ROWS.reshape(4, 16, 8)).reshape(64, 8)
    ),
    "in a grouped matmul": lambda w: weighed(
        lax.ragged_dot(ROWS, w[None], jnp.array([64], jnp.int32))
    ),
    "in a convolution": in_a_convolution,
    "scaled by a float32 number that is no parameter": lambda w: once(w) / 4 * 4,
}


def read_in_half(loss):
    """Returns a loss of a float32 weight that is cast to half once, before all its uses."""
    return lambda w: loss(w.astype(HALF))


EYE = np.eye(8, dtype=np.float32)


def accumulated(loss, w: Any = EYE, **options):
    return jax.jit(grad(loss, grads="accumulator", **options))(w)


def close(got, truth, rtol=2e-6):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, truth, rtol=0, atol=rtol * np.abs(truth).max())


def error(got):
    return np.abs(np.asarray(got, np.float64) - TRUTH).max() / np.abs(TRUTH).max()


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("stored", [np.float32, HALF], ids=["float32", "bfloat16"])
def test_gradients_of_weights_are_float32_accumulators(use, stored):
    w = np.eye(8, dtype=stored)
    loss = read_in_half(USES[use]) if stored == np.float32 else USES[use]
    value, got = jax.jit(value_and_grad(loss, grads="accumulator"))(w)
    close(got, TRUTH)
    np.testing.assert_allclose(value, float(loss(jnp.asarray(w))), rtol=1e-3)


def test_gradients_are_rounded_without_it():
    assert 5e-4 < error(grad(read_in_half(once))(EYE)) < 4e-3


def test_uses_of_a_weight_are_summed_unrounded():
    """JAX adds up the cotangents of a weight that is cast once in half precision."""
    uses = lambda w: once(w) + once(w) + once(jnp.transpose(jnp.transpose(w)))  # noqa: E731
    close(accumulated(read_in_half(uses)), 3 * TRUTH)


def test_a_sum_over_steps_that_a_loop_carries_in_half_is_carried_in_float32():
    """The cast stands outside of the loop, which adds up the weight's cotangents in half."""

    @read_in_half
    def loss(half):
        return lax.scan(lambda c, _: (c + once(half), None), jnp.float32(0), length=64)[0]

    close(accumulated(loss), 64 * TRUTH, rtol=1e-5)
    assert error(jax.jit(grad(loss))(EYE) / 64) > 0.02


def test_stacked_layers_that_are_cast_before_a_scan():
    @read_in_half
    def loss(half):
        return lax.scan(lambda c, w: (c + once(w), None), jnp.float32(0), half)[0]

    close(accumulated(loss, np.stack([EYE] * 3)), np.stack([TRUTH] * 3))


def test_gradients_of_an_embedding_and_a_bias_in_half_are_float32_sums():
    ids = np.zeros(4096, np.int32)

    def loss(params):
        y = params["table"].astype(HALF)[ids] + params["bias"].astype(HALF)
        return jnp.sum(y.astype(jnp.float32))

    params = {"table": np.zeros((2, 3), np.float32), "bias": np.zeros((1, 3), np.float32)}
    got = accumulated(loss, params)
    np.testing.assert_array_equal(got["table"], [[4096] * 3, [0] * 3])
    np.testing.assert_array_equal(got["bias"], [[4096] * 3])


def test_operands_and_activations_cotangents_stay_in_half():
    def loss(params):
        y = jnp.tanh(X @ params["up"].astype(HALF)) @ params["down"].astype(HALF)
        return weighed(y)

    step = grad(loss, grads="accumulator")
    dots = named(operations(step, {"up": EYE, "down": EYE}), "dot_general")
    assert {dot.inputs for dot in dots} == {("bfloat16", "bfloat16")}
    # forward, forward, and the cotangent of tanh; the gradients
    assert sorted(dot.outputs for dot in dots) == [("bfloat16",)] * 3 + [("float32",)] * 2


def test_a_float32_loss_has_the_same_program():
    def loss(w):
        return jnp.sum(jnp.square(X.astype(np.float32) @ w))

    kinds: Any = ("float32", "accumulator")
    programs = [jax.jit(grad(loss, grads=kind)).lower(EYE).as_text() for kind in kinds]
    assert programs[0].count("stablehlo.dot_general") == 2
    assert programs[0] == programs[1]


def test_an_accumulator_beyond_the_range_of_float16_is_finite():
    """A loss scale makes a weight's gradient, not its operands, overflow."""

    def loss(w):
        y = jnp.ones((4096, 2), jnp.float16) @ w.astype(jnp.float16)
        return jnp.sum(y.astype(jnp.float32))

    w = np.zeros((2, 2), np.float32)
    assert not np.isfinite(grad(loss, loss_scale=64.0)(w)).any()
    np.testing.assert_array_equal(accumulated(loss, w, loss_scale=64.0), 4096)


def test_a_weight_that_is_cast_inside_of_a_shard_map():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def loss(w):
        def local(x, c, w):
            y = x @ w.astype(HALF)
            return lax.psum(jnp.sum(y.astype(jnp.float32) * c.astype(jnp.float32)), "data")

        specs = (P("data"), P("data"), P())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(X, C, w)

    close(accumulated(loss), TRUTH)


def test_an_exchange_is_in_float32_unless_it_is_asked_for_in_half():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    def exchanged(vary, stored=np.float32):
        def local(x, c, w):
            def loss(w):
                y = x @ vary(w.astype(stored)).astype(HALF)
                return jnp.sum(y.astype(jnp.float32) * c.astype(jnp.float32))

            return grad(loss, grads="accumulator")(w)

        specs = (P("data"), P("data"), P())
        step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        text = str(jax.make_jaxpr(step)(X, C, EYE))
        return [line.split(":")[1].split("[")[0] for line in text.splitlines() if "psum" in line]

    assert exchanged(lambda w: policy.sharding.vary(w, "data", jnp.float32)) == ["f32"]
    for stored in (np.float32, HALF):  # a cast before the exchange, or none
        assert exchanged(lambda w: policy.sharding.vary(w, "data", HALF), stored) == ["bf16"]
    assert exchanged(lambda w: w, HALF) == ["f32"]  # by JAX, where the weight meets the batch


@pytest.mark.slow
def test_a_matmul_in_8_bits_keeps_its_float32_product():
    numbers = (((1,), (0,)), ((), ()))
    by = policy.quantized.ScaledMatmul("int8", "int8")

    @read_in_half
    def loss(w):
        return weighed(scaled_dot_general(jnp.asarray(X), w, numbers, by))

    with pytest.warns(policy.DtypePolicyWarning, match="no int8 matmuls"):
        wide, rounded = grad(loss, grads="accumulator")(EYE), grad(loss)(EYE)
    np.testing.assert_array_equal(wide.astype(HALF).astype(np.float32), rounded)
    assert not np.array_equal(wide, rounded)


def test_a_custom_rule_around_a_matmul_is_looked_into():
    @jax.custom_vjp
    def matmul(x, w):
        return x @ w

    matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, c: (c @ saved[1].T, saved[0].T @ c))
    close(accumulated(read_in_half(lambda w: weighed(matmul(X, w)))), TRUTH)

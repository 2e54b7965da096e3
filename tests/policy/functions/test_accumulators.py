"""Matmuls that return their accumulator, and arrays that stay in half precision in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from policy.functions.checkpointing import materialized
from policy.testing import assert_close_in_ulps, assert_dots_in, assert_same_program

RNG = np.random.default_rng(0)


def operands(dtype):
    query, key = RNG.normal(size=(2, 3, 2, 8)), RNG.normal(size=(2, 5, 2, 8))
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype)


def logits(query, key):
    return policy.reductions.einsum("btnh,bsnh->btns", query, key)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_is_multiplied_and_float32_handed_on(dtype):
    query, key = operands(dtype)
    got = logits(query, key)
    assert got.dtype == jnp.float32
    truth = np.einsum("btnh,bsnh->btns", np.asarray(query, np.float64), np.asarray(key, np.float64))
    assert_close_in_ulps(got, truth, 4, floor=1.0)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_matmuls_of_half_and_come_back_in_it(dtype):
    query, key = operands(dtype)
    # representable: the cotangent is rounded to half
    weights = jnp.asarray(RNG.normal(size=(2, 3, 2, 5)), dtype)

    def loss(query, key):
        return jnp.sum(logits(query, key) * weights.astype(jnp.float32))

    assert_dots_in(jax.grad(loss, (0, 1)), (query, key), dtype)
    ours = jax.grad(loss, (0, 1))(query, key)
    wide = [np.asarray(x, np.float64) for x in (query, key, weights)]
    truths = (
        np.einsum("btns,bsnh->btnh", wide[2], wide[1]),
        np.einsum("btns,btnh->bsnh", wide[2], wide[0]),
    )
    for gradient, truth in zip(ours, truths, strict=True):
        assert gradient.dtype == dtype
        assert_close_in_ulps(gradient, truth, 2, floor=1.0)  # a backend may round within the sum


def test_float32_is_jax_s_own_einsum():
    theirs = lambda q, k: jnp.einsum("btnh,bsnh->btns", q, k)  # noqa: E731
    assert_same_program(logits, theirs, operands(jnp.float32))


@pytest.mark.slow
def test_the_policy_s_reduction_dtype_is_what_is_handed_on():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(jnp.bfloat16)]
    with policy.use_policy("p=f32,c=bf16,o=f32,reduction=bf16"):
        assert jax.eval_shape(logits, *shapes).dtype == jnp.bfloat16


@pytest.mark.slow
def test_operands_of_two_dtypes_or_integers_are_rejected():
    query, key = operands(jnp.bfloat16)
    told = "takes two floating operands of one dtype, but got"
    with pytest.raises(TypeError, match=f"{told} bfloat16 and float32"):
        logits(query, key.astype(jnp.float32))
    with pytest.raises(TypeError, match=f"{told} int32 and int32"):
        logits(query.astype(int), key.astype(int))


X = jnp.asarray(np.linspace(-2, 2, 12).reshape(3, 4), jnp.bfloat16)


def test_values_tangents_and_cotangents_pass_unchanged():
    for transform in (lambda fn: fn, jax.jit, jax.vmap, jax.checkpoint):
        run = transform(materialized)
        np.testing.assert_array_equal(run(X), X)
    y, tangent = jax.jvp(materialized, (X,), (2 * X,))
    np.testing.assert_array_equal((y, tangent), (X, 2 * X))
    gradient = jax.grad(lambda x: jnp.sum(materialized(x) * X).astype(jnp.float32))
    np.testing.assert_array_equal(gradient(X), X)
    second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(materialized(x) ** 3))(x)))(X)
    np.testing.assert_array_equal(second, 6 * X)


@pytest.mark.slow
def test_a_barrier_is_in_programs_for_gpus_alone():
    traced = jax.jit(jax.grad(lambda x: jnp.sum(materialized(x) * x))).trace(X)
    for platform in ("cpu", "tpu", "cuda", "rocm"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("optimization_barrier" in text) == (platform in ("cuda", "rocm"))

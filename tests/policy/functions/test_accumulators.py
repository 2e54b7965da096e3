"""`policy.reductions.einsum` hands on its accumulator, and multiplies half numbers backward too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from policy.testing import assert_close_in_ulps, assert_dots_in, assert_same_program

RNG = np.random.default_rng(0)


def operands(dtype):
    query, key = RNG.normal(size=(2, 3, 2, 8)), RNG.normal(size=(2, 5, 2, 8))
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype)


def logits(query, key):
    return policy.reductions.einsum("btnh,bsnh->btns", query, key)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_is_multiplied_and_float32_handed_on(dtype):
    query, key = operands(dtype)
    got = logits(query, key)
    assert got.dtype == jnp.float32
    truth = np.einsum("btnh,bsnh->btns", np.asarray(query, np.float64), np.asarray(key, np.float64))
    assert_close_in_ulps(got, truth, 4, floor=1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_are_matmuls_of_half_and_come_back_in_it(dtype):
    query, key = operands(dtype)
    weights = jnp.asarray(
        RNG.normal(size=(2, 3, 2, 5)), dtype
    )  # representable: the cotangent is rounded to half

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
    assert_same_program(
        logits, lambda q, k: jnp.einsum("btnh,bsnh->btns", q, k), operands(jnp.float32)
    )


def test_the_policy_s_reduction_dtype_is_what_is_handed_on():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(jnp.bfloat16)]
    with policy.use_policy("p=f32,c=bf16,o=f32,reduction=bf16"):
        assert jax.eval_shape(logits, *shapes).dtype == jnp.bfloat16


def test_operands_of_two_dtypes_or_integers_are_refused():
    query, key = operands(jnp.bfloat16)
    with pytest.raises(
        TypeError, match="takes two floating operands of one dtype, but got bfloat16 and float32"
    ):
        logits(query, key.astype(jnp.float32))
    with pytest.raises(
        TypeError, match="takes two floating operands of one dtype, but got int32 and int32"
    ):
        logits(query.astype(int), key.astype(int))

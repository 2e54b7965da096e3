"""The two places to add a bias that benchmarks.accel.bias compares: their errors, and their
derivatives.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accel import bias
from policy import testing

RNG = np.random.default_rng(0)
X, KERNEL, BIAS = (
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in enumerate([(64, 32), (32, 48), (48,)])
)


@pytest.mark.parametrize(("adds", "ulps"), [(bias.to_accumulator, 0.501), (bias.to_rounded, 1.51)])
def test_roundings_of_a_bias(adds, ulps):
    x, kernel = X.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16)
    product = np.matmul(np.asarray(x, np.float64), np.asarray(kernel, np.float64))
    truth = product + np.float64(BIAS)
    spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(product), np.abs(truth)))) - 7)
    error = np.max(np.abs(np.float64(adds(bias._matmul, x, kernel, BIAS)) - truth) / spacing)
    assert ulps / 3 < error <= ulps  # below a third the roundings told apart would not be there


@pytest.mark.parametrize(("operation", "window"), [(bias._matmul, ()), (bias._convolution, (3, 3))])
def test_both_places_have_the_derivatives_of_float32(operation, window):
    x = jnp.asarray(RNG.normal(size=(2, *(5 for _ in window), 16)), jnp.bfloat16)
    kernel = jnp.asarray(RNG.normal(size=(*window, 16, 8)), jnp.bfloat16)
    shift = jnp.asarray(RNG.normal(size=8), jnp.float32)

    def loss(adds, x, kernel, shift):
        return jnp.sum(jnp.square(adds(operation, x, kernel, shift).astype(jnp.float32)))

    def exact(operation, x, kernel, shift):
        y = operation(x, kernel)
        return y + shift.reshape((1,) * (y.ndim - 1) + shift.shape)

    wide = (x.astype(jnp.float32), kernel.astype(jnp.float32), shift)
    truth = jax.grad(functools.partial(loss, exact), argnums=(0, 1, 2))(*wide)
    for adds in (bias.to_accumulator, bias.to_rounded):
        step = jax.grad(functools.partial(loss, adds), argnums=(0, 1, 2))
        for found, true, at in zip(step(x, kernel, shift), truth, (x, kernel, shift), strict=True):
            assert found.dtype == at.dtype
            # Roundings of result, cotangent and gradient, 2^-9 each, and of product and bias where
            # they come first.
            assert np.linalg.norm(
                np.float32(found) - np.float32(true)
            ) < 5 * 2**-9 * np.linalg.norm(true)
        testing.assert_dots_in(step, (x, kernel, shift), jnp.bfloat16)

"""The two places to add a bias that benchmarks.accel.bias compares: their errors, and their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accel import bias
from policy import testing

X, KERNEL, BIAS = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(64, 32), (32, 48), (48,)]))


@pytest.mark.parametrize(("adds", "ulps"), [(bias.to_accumulator, 0.501), (bias.to_rounded, 1.51)])
def test_roundings_of_a_bias(adds, ulps):
    x, kernel = X.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16)
    product = np.matmul(np.asarray(x, np.float64), np.asarray(kernel, np.float64))
    truth = product + np.float64(BIAS)
    spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(product), np.abs(truth)))) - 7)
    error = np.max(np.abs(np.float64(adds(bias._matmul, x, kernel, BIAS)) - truth) / spacing)
    assert ulps / 3 < error <= ulps


@pytest.mark.parametrize("case", bias.CASES, ids=lambda case: case.name)
def test_both_places_have_the_same_derivatives(case):
    x = jnp.ones((2, *(4 for _ in case.inputs[1:-1]), case.inputs[-1]), jnp.bfloat16)
    kernel, shift = (0.1 * jnp.ones(shape, jnp.bfloat16) for shape in (case.kernels[0], case.kernels[0][-1:]))

    def loss(adds, x, kernel, shift):
        return jnp.sum(jnp.square(adds(case.operation, x, kernel, shift).astype(jnp.float32)))

    ours, hand = (
        jax.grad(functools.partial(loss, adds), argnums=(0, 1, 2))(x, kernel, shift.astype(jnp.float32))
        for adds in (bias.to_accumulator, bias.to_rounded)
    )
    for one, other in zip(ours, hand, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=2e-2)
    step = jax.grad(functools.partial(loss, bias.to_accumulator), argnums=(0, 1))
    testing.assert_dots_in(step, (x, kernel, shift.astype(jnp.float32)), jnp.bfloat16)

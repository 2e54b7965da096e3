"""The two places to add a bias that benchmarks.accel.bias compares: their errors, and their
derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accel import bias

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

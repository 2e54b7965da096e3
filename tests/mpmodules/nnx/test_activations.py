"""PReLU, and the functions that nnx shares with linen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import get_policy, use_policy

X = jax.random.normal(jax.random.key(0), (64,))


def test_the_functions_are_the_same_in_both_wings():
    for name in ("softmax", "log_softmax", "logsumexp", "log_sigmoid", "softplus", "standardize"):
        assert getattr(nnx, name) is getattr(linen, name) is not getattr(flax_nnx, name)


def test_prelu_in_float32_is_upstreams_bit_for_bit():
    ours, upstream = nnx.PReLU(0.3), flax_nnx.PReLU(0.3)
    np.testing.assert_array_equal(ours(X), upstream(X))
    assert float(ours.negative_slope[...]) == float(upstream.negative_slope[...])


def test_upstreams_slope_gradient_is_rounded_to_bfloat16():
    x = jnp.full((4097,), -1, jnp.bfloat16)

    def gradient(layers):
        grad = flax_nnx.grad(lambda layer: jnp.sum(layer(x).astype(jnp.float32)))(layers.PReLU())
        return float(grad["negative_slope"][...])

    if gradient(flax_nnx) == -4097:
        pytest.skip("this Flax sums it in float32")
    assert gradient(nnx) == -4097


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32"))
def test_prelu_keeps_its_slope_in_param_dtype(policy):
    policy = get_policy(policy)
    with use_policy(policy):
        layer = nnx.PReLU()
    y, half = layer(X), np.asarray(X.astype(policy.compute_dtype), np.float64)
    assert y.dtype == policy.compute_dtype and layer.negative_slope[...].dtype == policy.param_dtype
    gradient = flax_nnx.grad(lambda layer: jnp.sum(layer(X).astype(jnp.float32)))(layer)[
        "negative_slope"
    ][...]
    assert gradient.dtype == policy.param_dtype
    exact = np.where(half >= 0, 1, float(layer.negative_slope[...])) * half
    np.testing.assert_allclose(
        np.asarray(y, np.float64), exact, rtol=float(jnp.finfo(y.dtype).eps) / 2
    )


def test_prelu_obeys_a_promotion_of_the_users_own():
    promote: Any = lambda arrays, dtype: tuple(2 * a for a in arrays)  # noqa: E731
    layer = nnx.PReLU(dtype=jnp.bfloat16, promote_dtype=promote)
    assert layer(X).dtype == jnp.float32

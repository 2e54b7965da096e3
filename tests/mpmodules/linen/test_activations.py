"""Softmax and its relatives as the two wings export them, and PReLU."""

import inspect
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from mpmodules import nnx
from policy import get_policy, use_policy
from policy.inspect.ulps import ulps
from policy.testing import assert_close_in_ulps

HALVES = (jnp.bfloat16, jnp.float16)
FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "log_sigmoid", "softplus", "standardize")


def normal(shape, dtype=jnp.float32, scale=1.0):
    return (scale * jax.random.normal(jax.random.key(0), shape)).astype(dtype)


def in_float64(name, x):
    x = np.asarray(x, np.float64)
    shifted = x - x.max(-1, keepdims=True)
    lse = np.log(np.exp(shifted).sum(-1, keepdims=True))
    return {
        "softmax": np.exp(shifted - lse),
        "log_softmax": shifted - lse,
        "logsumexp": (lse + x.max(-1, keepdims=True))[..., 0],
        "log_sigmoid": -np.logaddexp(0, -x),
        "softplus": np.logaddexp(0, x),
        "standardize": (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
    }[name]


def call(function, name, x):
    return function(x, axis=-1) if name == "logsumexp" else function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_without_a_policy_is_upstreams_bit_for_bit(name):
    x = normal((5, 33))
    for wing in (nn, nnx):
        ours, upstream = call(getattr(wing, name), name, x), call(getattr(flax_nn, name), name, x)
        assert ours.dtype == upstream.dtype
        np.testing.assert_array_equal(ours, upstream)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_is_within_one_ulp(name, dtype):
    x = normal((5, 1000), dtype, 3.0)
    for policy in (None, "mixed_bfloat16"):
        with use_policy(policy):
            y = call(getattr(nn, name), name, x)
        assert y.dtype == dtype
        assert_close_in_ulps(y, in_float64(name, x), 0.51)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_keeps_what_came_in_and_a_rows_statistics(name):
    x = normal((4, 64), jnp.bfloat16)
    _, backward = jax.vjp(lambda x: call(getattr(nn, name), name, x), x)
    kept = [
        leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "dtype") and leaf.size > len(x)
    ]
    assert (
        all(leaf.dtype == jnp.bfloat16 for leaf in kept)
        and sum(leaf.size for leaf in kept) <= x.size
    )
    assert backward(jnp.ones_like(call(getattr(nn, name), name, x)))[0].dtype == jnp.bfloat16


def test_upstreams_log_softmax_is_many_ulps_off():
    x = normal((5, 1000), jnp.bfloat16, 3.0)
    worst = ulps(flax_nn.log_softmax(x), in_float64("log_softmax", x), x.dtype).max()
    if worst <= 1:
        pytest.skip(f"this Flax is within {worst} ulps")
    assert ulps(nn.log_softmax(x), in_float64("log_softmax", x), x.dtype).max() < worst


def test_standardize_does_not_cancel_under_a_policy():
    x = 1000 + normal((3, 500))
    expected = in_float64("standardize", x)
    with use_policy("mixed_bfloat16"):
        assert np.abs(np.asarray(nn.standardize(x)) - expected).max() < 1e-3
    chosen = nn.standardize(x, algorithm="stable")
    np.testing.assert_array_equal(chosen, jax.nn.standardize(x, algorithm="stable"))  # type: ignore[call-arg]
    half = nn.standardize(x.astype(jnp.bfloat16), algorithm="fast")  # obeyed, in float32
    assert half.dtype == jnp.bfloat16


def test_standardize_takes_statistics_of_another_dtype():
    x = normal((3, 8), jnp.bfloat16)
    mean, variance = jnp.zeros((3, 1)), jnp.ones((3, 1))
    y = nn.standardize(x, mean=mean, variance=variance)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        y, (np.asarray(x, np.float32) / np.sqrt(np.float32(1 + 1e-5))).astype(jnp.bfloat16)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_upstreams(name):
    ours = list(inspect.signature(getattr(nn, name)).parameters)
    upstream = list(inspect.signature(getattr(flax_nn, name)).parameters)
    assert [p for p in ours if p in upstream] == upstream


def test_the_old_name_of_standardize_is_ours_too():
    assert nn.normalize is nn.standardize is nnx.standardize


# --------------------------------------------------------------------------------------------------
# PReLU
# --------------------------------------------------------------------------------------------------


def total(y: Any) -> jax.Array:
    return jnp.sum(y.astype(jnp.float32))


def test_prelu_in_float32_is_upstreams_bit_for_bit():
    x = normal((4, 7))
    ours, variables = nn.PReLU(negative_slope_init=0.3).init_with_output(jax.random.key(0), x)
    upstream, expected = flax_nn.PReLU(negative_slope_init=0.3).init_with_output(
        jax.random.key(0), x
    )
    np.testing.assert_array_equal(ours, upstream)
    assert jax.tree.map(float, variables) == jax.tree.map(float, expected)


def test_upstreams_slope_gradient_is_rounded_to_bfloat16():
    x = jnp.full((4097,), -1, jnp.bfloat16)
    variables = {"params": {"negative_slope": jnp.float32(0.01)}}

    def gradient(layers):
        grad = jax.grad(lambda v: total(layers.PReLU().apply(v, x)))(variables)
        return float(grad["params"]["negative_slope"])

    if gradient(flax_nn) == -4097:
        pytest.skip("this Flax sums it in float32")
    assert gradient(nn) == -4097


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32"))
def test_prelu_keeps_its_slope_in_param_dtype(policy):
    policy = get_policy(policy)
    x = normal((64,))
    with use_policy(policy):
        y, variables = nn.PReLU().init_with_output(jax.random.key(0), x)
        half = x.astype(policy.compute_dtype)
        slope: Any = variables["params"]["negative_slope"]
        gradient = jax.grad(lambda v: total(nn.PReLU().apply(v, half)))(variables)
    assert y.dtype == policy.compute_dtype and slope.dtype == policy.param_dtype
    assert jax.tree.leaves(gradient)[0].dtype == policy.param_dtype
    exact = np.where(np.asarray(half, np.float64) >= 0, 1, float(slope)) * np.asarray(
        half, np.float64
    )
    assert_close_in_ulps(y, exact, 0.5)


@pytest.mark.parametrize("dtype", HALVES)
def test_prelu_keeps_its_half_input_for_backward(dtype):
    x = normal((64,), dtype)
    variables = nn.PReLU().init(jax.random.key(0), x)
    _, backward = jax.vjp(lambda v, x: nn.PReLU().apply(v, x), variables, x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "dtype") and leaf.size > 1]
    assert {leaf.dtype for leaf in kept} <= {jnp.dtype(dtype), jnp.dtype(bool)}
    assert sum(leaf.nbytes for leaf in kept) <= 3 * x.size


def test_prelu_of_flaxs_own_obeys_a_policy_applied_to_it():
    x = jnp.full((4097,), -1.0)
    ported = nn.apply_policy(flax_nn.PReLU(), "mixed_bfloat16")
    variables = ported.init(jax.random.key(0), x)
    gradient = jax.grad(lambda v: total(ported.apply(v, x)))(variables)
    assert float(gradient["params"]["negative_slope"]) == -4097

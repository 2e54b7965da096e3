"""Softmax and its relatives as the two wings export them, and PReLU."""

import inspect
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen as nn
from mpmodules import nnx
from policy import get_policy, use_policy
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

both_wings = pytest.mark.parametrize("wing", ["linen", "nnx"])


def prelu(layers: Any, slope: float = 0.01) -> tuple[Any, Any]:
    """Returns the slope as it is stored, and a call: slope and inputs to outputs."""
    if layers in (nn, flax_nn):
        layer: Any = layers.PReLU(negative_slope_init=slope)
        variables = layer.init(jax.random.key(0), jnp.zeros(()))
        apply = lambda slope, x: layer.apply({"params": {"negative_slope": slope}}, x)  # noqa: E731
        return variables["params"]["negative_slope"], apply
    layer = layers.PReLU(slope)

    def call(slope: Any, x: jax.Array) -> jax.Array:
        copy = flax_nnx.clone(layer)
        copy.negative_slope.set_value(slope)
        return copy(x)

    return layer.negative_slope[...], call


def ours_and_theirs(wing: str) -> tuple[Any, Any]:
    return (nn, flax_nn) if wing == "linen" else (nnx, flax_nnx)


def by_slope(apply: Any, slope: Any, x: jax.Array) -> jax.Array:
    return jax.grad(lambda slope: jnp.sum(apply(slope, x).astype(jnp.float32)))(slope)


@both_wings
def test_prelu_in_float32_is_upstreams_bit_for_bit(wing):
    (slope, ours), (expected, theirs) = (prelu(w, 0.3) for w in ours_and_theirs(wing))
    np.testing.assert_array_equal(slope, expected)
    x = normal((4, 7))
    np.testing.assert_array_equal(ours(slope, x), theirs(expected, x))


@both_wings
def test_the_gradient_of_a_slope_is_summed_in_float32(wing):
    slope, apply = prelu(ours_and_theirs(wing)[0])
    assert float(by_slope(apply, slope, jnp.full((4097,), -1, jnp.bfloat16))) == -4097


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32"))
@both_wings
def test_prelu_keeps_its_slope_in_param_dtype(wing, policy):
    policy, x = get_policy(policy), normal((64,))
    with use_policy(policy):
        slope, apply = prelu(ours_and_theirs(wing)[0])
        y, gradient = apply(slope, x), by_slope(apply, slope, x)
    assert y.dtype == policy.compute_dtype
    assert slope.dtype == gradient.dtype == policy.param_dtype
    half = np.asarray(x.astype(policy.compute_dtype), np.float64)
    assert_close_in_ulps(y, np.where(half >= 0, 1, float(slope)) * half, 0.5)


@pytest.mark.parametrize("dtype", HALVES)
def test_prelu_keeps_its_half_input_for_backward(dtype):
    x, (slope, apply) = normal((64,), dtype), prelu(nn)
    _, backward = jax.vjp(apply, slope, x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "dtype") and leaf.size > 1]
    assert {leaf.dtype for leaf in kept} <= {jnp.dtype(dtype), jnp.dtype(bool)}
    assert sum(leaf.nbytes for leaf in kept) <= 3 * x.size


def test_prelu_of_flaxs_own_obeys_a_policy_applied_to_it():
    x = jnp.full((4097,), -1.0)
    ported = nn.apply_policy(flax_nn.PReLU(), "mixed_bfloat16")
    variables: Any = ported.init(jax.random.key(0), x)
    apply = lambda slope, x: ported.apply({"params": {"negative_slope": slope}}, x)  # noqa: E731
    assert float(by_slope(apply, variables["params"]["negative_slope"], x)) == -4097


def test_prelu_obeys_a_promotion_of_the_users_own():
    promote: Any = lambda arrays, dtype: tuple(2 * a for a in arrays)  # noqa: E731
    layer = nnx.PReLU(dtype=jnp.bfloat16, promote_dtype=promote)
    assert layer(normal((64,))).dtype == jnp.float32

"""Softmax and its relatives as the two APIs export them, and PReLU."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from mpmodules import nnx
from policy import get_policy, reductions, use_policy
from policy.testing import assert_close_in_ulps
from tests.mpmodules.apis import BOTH, MIXED, Text, added_up, assert_same_bits, layer

HALVES = (jnp.bfloat16, jnp.float16)
FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "log_sigmoid", "softplus", "standardize")


def normal(shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


def call(function, name, x):
    return function(x, axis=-1) if name == "logsumexp" else function(x)


@pytest.mark.cases(fast=1, slow=6)
@BOTH
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_without_a_policy_is_upstreams_bit_for_bit_and_half_that_of_reductions(api, name):
    x = normal((5, 33))
    function, flaxs = getattr(api.module, name), getattr(api.flax, name)
    ours, theirs = call(function, name, x), call(flaxs, name, x)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    upstream = list(inspect.signature(flaxs).parameters)
    assert [p for p in inspect.signature(function).parameters if p in upstream] == upstream
    for policy in (None, MIXED):
        x = normal((5, 33), jnp.bfloat16)
        with use_policy(policy):
            assert_same_bits(call(function, name, x), call(getattr(reductions, name), name, x))


def test_standardize_does_not_cancel_under_a_policy_and_has_its_old_name():
    x = 1000 + normal((3, 500))
    wide = np.asarray(x, np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    with use_policy(MIXED):
        assert np.abs(np.asarray(nn.standardize(x)) - expected).max() < 1e-3
    chosen = nn.standardize(x, algorithm="stable")
    np.testing.assert_array_equal(chosen, jax.nn.standardize(x, algorithm="stable"))  # type: ignore[call-arg]
    half = nn.standardize(x.astype(jnp.bfloat16), algorithm="fast")  # obeyed, in float32
    assert half.dtype == jnp.bfloat16
    assert nn.normalize is nn.standardize is nnx.standardize


PRELU = Text(
    lambda self, x: self.prelu(x),
    prelu=layer(lambda nn: nn.PReLU(negative_slope_init=0.3), lambda nnx, rngs: nnx.PReLU(0.3)),
)


def slope_of(tree: Any) -> jax.Array:
    (slope,) = jax.tree.leaves(tree)
    return slope


@pytest.mark.cases(fast=1, slow=5)
@BOTH
@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32"))
def test_prelu_keeps_its_slope_in_param_dtype(api, policy):
    policy, x = get_policy(policy), normal((64,))
    model = api.ours(PRELU, policy, x)
    y, gradient = model(x), slope_of(jax.grad(model.total(x))(model.params))
    slope = slope_of(model.params)
    assert y.dtype == policy.output_dtype
    assert slope.dtype == gradient.dtype == policy.param_dtype
    half = np.asarray(x.astype(policy.compute_dtype), np.float64)
    rounded = jnp.asarray(y, policy.compute_dtype)
    assert_close_in_ulps(rounded, np.where(half >= 0, 1, float(slope)) * half, 0.5)


@pytest.mark.parametrize("dtype", HALVES)
def test_prelu_keeps_its_half_input_for_backward(dtype):
    x, prelu = normal((64,), dtype), nn.PReLU()
    params = prelu.init(jax.random.key(0), x)
    _, backward = jax.vjp(lambda params, x: added_up(prelu.apply(params, x)), params, x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "dtype") and leaf.size > 1]
    assert {leaf.dtype for leaf in kept} <= {jnp.dtype(dtype), jnp.dtype(bool)}
    assert sum(leaf.nbytes for leaf in kept) <= 3 * x.size


def test_prelu_obeys_a_promotion_of_the_users_own():
    promote: Any = lambda arrays, dtype: tuple(2 * a for a in arrays)  # noqa: E731
    layer = nnx.PReLU(dtype=jnp.bfloat16, promote_dtype=promote)
    assert layer(normal((64,))).dtype == jnp.float32

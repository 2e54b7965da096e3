"""Reductions are right in half precision: against float64, in ulps of what they return."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from policy import reductions, use_policy
from policy.testing import assert_close_in_ulps, assert_same_program

HALVES = [jnp.bfloat16, jnp.float16]


def normal(seed, shape, dtype, offset=0):
    numbers = np.random.default_rng(seed).normal(size=shape) + offset
    return jnp.asarray(numbers, jnp.float32).astype(dtype)


def _standardize(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


FUNCTIONS = {
    "softmax": (reductions.softmax, lambda x: scipy.special.softmax(x, -1)),
    "log_softmax": (reductions.log_softmax, lambda x: scipy.special.log_softmax(x, -1)),
    "logsumexp": (lambda x: reductions.logsumexp(x, -1), lambda x: scipy.special.logsumexp(x, -1)),
    "log_sigmoid": (reductions.log_sigmoid, scipy.special.log_expit),
    "softplus": (reductions.softplus, lambda x: np.logaddexp(0, x)),
    "standardize": (reductions.standardize, _standardize),
    "mean": (lambda x: reductions.mean(x, -1), lambda x: x.mean(-1)),
    "var": (lambda x: reductions.var(x, -1), lambda x: x.var(-1)),
    "std": (lambda x: reductions.std(x, -1, ddof=1), lambda x: x.std(-1, ddof=1)),
    "cumsum": (lambda x: reductions.cumsum(x, -1), lambda x: x.cumsum(-1)),
}


@pytest.mark.cases(fast=2, slow=10)
@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_half_precision_is_within_an_ulp_of_float64(name, dtype, offset):
    function, truth = FUNCTIONS[name]
    x = normal(0, (4, 48), dtype, offset)
    found = jax.jit(function)(x)
    assert found.dtype == dtype
    assert_close_in_ulps(found, truth(np.asarray(x, np.float64)), 1)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_float32_rounded_once_and_keep_no_float32(name, dtype):
    function, _ = FUNCTIONS[name]
    x = normal(1, (3, 8), dtype)
    weights = normal(2, function(x).shape, dtype)

    def loss(x):
        return (function(x).astype(jnp.float32) * weights.astype(jnp.float32)).sum()

    gradient, wide = jax.grad(loss)(x), jax.grad(loss)(x.astype(jnp.float32))
    assert gradient.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32), wide, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-3
    )
    saved = jax.tree.leaves(jax.vjp(function, x)[1])
    assert all(s.dtype != jnp.float32 for s in saved if s.size >= x.size)
    _, tangent = jax.jvp(function, (x,), (jnp.ones_like(x),))
    assert tangent.dtype == dtype and jnp.isfinite(tangent).all()


def test_float32_runs_jax_s_own_program():
    x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    for name in ("softmax", "softplus"):
        assert_same_program(getattr(reductions, name), getattr(jax.nn, name), (x,))


def test_the_policy_s_reduction_dtype_is_obeyed():
    x = jnp.ones((2, 3), jnp.bfloat16)
    with jax.enable_x64(True), use_policy("c=bf16,r=f64"):
        assert "f64" in str(jax.make_jaxpr(reductions.softmax)(x))
    assert "f32" in str(jax.make_jaxpr(reductions.softmax)(x))
    assert reductions.mean(x, dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("dtype", "extreme"), [(jnp.bfloat16, 1e4), (jnp.float16, 6e4)])
def test_extreme_logits_stay_finite(dtype, extreme):
    x = jnp.array([extreme, -extreme, 0], dtype)
    np.testing.assert_array_equal(np.asarray(reductions.softmax(x), np.float32), [1, 0, 0])
    assert float(reductions.logsumexp(x)) == float(x[0])
    assert reductions.softplus(x).tolist()[:2] == [float(x[0]), 0]
    assert jnp.isfinite(jax.grad(lambda x: reductions.log_softmax(x)[0])(x)).all()


@pytest.mark.slow
def test_short_and_empty_axes_are_as_numpy_has_them():
    one, none = jnp.ones((2, 1), jnp.bfloat16), jnp.ones((0, 2), jnp.bfloat16)
    assert reductions.softmax(one).tolist() == [[1], [1]]
    assert reductions.var(one, -1).tolist() == [0, 0]
    assert reductions.cumsum(none, 0).shape == (0, 2)
    assert reductions.logsumexp(none, 0).tolist() == [-np.inf, -np.inf]
    assert reductions.softmax(none).shape == (0, 2)
    assert reductions.global_norm({}) == 0 and reductions.global_norm({"a": none}) == 0


def test_masked_entries_get_nothing():
    x, where = jnp.zeros((2, 4), jnp.bfloat16), jnp.array([[True, True, False, False], [False] * 4])
    assert reductions.softmax(x, where=where).tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]
    assert reductions.mean(x + 1, -1, where=jnp.ones_like(where)).tolist() == [1, 1]


@pytest.mark.slow
def test_a_long_sum_does_not_stall():
    x = jnp.ones(4096, jnp.bfloat16)
    assert float(reductions.cumsum(x)[-1]) == 4096
    assert reductions.segment_sum(x, jnp.arange(4096) % 2, 2).tolist() == [2048, 2048]
    assert reductions.cumsum(x[:3], reverse=True).tolist() == [3, 2, 1]
    assert reductions.cumprod(2 * x[:4].reshape(2, 2), 1).tolist() == [[2, 4], [2, 4]]
    gradient = jax.grad(lambda table: (table[jnp.zeros(4096, int)]).sum())(jnp.ones(2))
    assert gradient.tolist() == [4096, 0]


@pytest.mark.slow
def test_the_global_norm_of_float16_does_not_overflow():
    assert float(reductions.global_norm({"a": jnp.full(4096, 300, jnp.float16)})) == 19200
    half, complex_one = jnp.array([3.0], jnp.bfloat16), jnp.array([4j], jnp.complex64)
    assert float(reductions.global_norm({"a": half, "b": complex_one, "n": jnp.arange(3)})) == 5
    assert jax.grad(reductions.global_norm)(jnp.zeros(2)).tolist() == [0, 0]
    assert np.isnan(reductions.global_norm(jnp.array([np.nan, 0])))


def test_standardize_takes_given_statistics():
    x, given = jnp.array([[1.0, 3.0]], jnp.bfloat16), {"mean": jnp.array(1.0), "epsilon": 0.0}
    assert reductions.standardize(x, variance=jnp.array(4.0), **given).tolist() == [[0, 1]]
    assert reductions.standardize(x, **given).tolist() == [[0, 2]]


def test_integers_are_summed_exactly():
    large = jnp.array([2**24, 1, 1])
    ids = jnp.zeros(3, int)
    assert reductions.cumsum(large).tolist() == [2**24, 2**24 + 1, 2**24 + 2]
    assert reductions.cumsum(large, reverse=True).tolist() == [2**24 + 2, 2, 1]
    assert reductions.cumprod(jnp.array([2**24 + 1, 3])).tolist() == [2**24 + 1, 3 * 2**24 + 3]
    assert reductions.segment_sum(large, ids, 1).tolist() == [2**24 + 2]
    mask = jnp.array([True, True, False])
    assert reductions.cumsum(mask).tolist() == [1, 2, 2]
    assert reductions.segment_sum(mask, ids, 1).tolist() == [2]
    products, sums = reductions.cumprod(large), reductions.segment_sum(mask, ids, 1)
    for found in (reductions.cumsum(mask), products, sums):
        assert jnp.issubdtype(found.dtype, jnp.integer)
    assert reductions.cumsum(large, 0, jnp.bfloat16).dtype == jnp.bfloat16
    assert reductions.segment_sum(jnp.ones(3, jnp.int8), ids, 1, dtype=jnp.int32).dtype == jnp.int32


def test_running_sums_reject_an_axis_that_there_is_not():
    with pytest.raises(ValueError, match="axis 2 is out of bounds for array of dimension 2"):
        reductions.cumsum(jnp.ones((2, 3)), 2)
    assert reductions.cumsum(jnp.float32(2.0), -1).tolist() == [2.0]


def test_the_variance_of_complex_numbers_is_real():
    x = jnp.array([1j, -1j], jnp.complex64)
    for spread in (reductions.var(x), reductions.std(x)):
        assert (spread.dtype, float(spread)) == (jnp.float32, 1.0)


@pytest.mark.slow
def test_dtype_and_flags_are_taken_by_position_as_jax_takes_them():
    x, ids = jnp.ones((2, 4), jnp.bfloat16), jnp.array([0, 1])
    for name in ("mean", "var", "std", "cumsum", "cumprod"):
        assert getattr(reductions, name)(x, 0, jnp.float32).dtype == jnp.float32
    assert reductions.segment_sum(x, ids, 2, True, True).tolist() == x.tolist()

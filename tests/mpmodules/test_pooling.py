"""Pooling in half precision: windows summed in float32, forward and backward."""

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpmodules import linen as nn
from mpmodules import nnx
from policy import use_policy
from policy.programs.reading.walk import walk
from policy.testing import assert_close_in_ulps

HALVES = (jnp.bfloat16, jnp.float16)
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def normal(shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


def dtypes_of(prefix, function, *args):
    """The dtypes of the first outputs of primitives of that name, inner jaxprs included."""
    equations = [site.equation for site in walk(jax.make_jaxpr(function)(*args))]
    found = [e for e in equations if e.outvars and e.primitive.name.startswith(prefix)]
    return {e.outvars[0].aval.dtype for e in found}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_is_summed_in_float32(dtype):
    x = normal((1, 20, 20, 2), dtype)
    weights = 1 + jax.random.uniform(jax.random.key(1), (1, 7, 7, 2))

    def loss(x):
        return jnp.sum(nn.avg_pool(x, (14, 14)).astype(jnp.float32) * weights)

    gradient = jax.grad(loss)(x)
    rounded = np.asarray(weights.astype(dtype), np.float64)  # the cotangent that arrives is half
    expected = np.zeros(x.shape)
    for i, j in np.ndindex(7, 7):
        expected[:, i : i + 14, j : j + 14] += rounded[:, i : i + 1, j : j + 1] / 196
    assert gradient.dtype == dtype
    assert_close_in_ulps(gradient, expected, 1)
    assert dtypes_of("reduce_window", jax.grad(loss), x) == {FLOAT32}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", HALVES)
def test_backward_keeps_nothing_in_float32(dtype):
    x = normal((2, 8, 8, 3), dtype)
    for pool in (nn.avg_pool, nn.max_pool, nnx.min_pool):
        _, backward = jax.vjp(lambda x, pool=pool: pool(x, (3, 3), padding="SAME"), x)
        kept = [x for x in jax.tree.leaves(backward) if hasattr(x, "dtype") and x.size > 1]
        assert {leaf.dtype for leaf in kept} <= {jnp.dtype(dtype)}
        assert sum(leaf.size for leaf in kept) <= x.size


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("pool", ("avg_pool", "max_pool", "min_pool"))
@pytest.mark.parametrize("padding", ("SAME", "VALID", ((1, 0), (2, 1))))
@pytest.mark.parametrize("strides", (None, (2, 1), (3, 3)))
@pytest.mark.parametrize("batch", ((), (2,), (2, 3)))
def test_float32_is_upstreams_bit_for_bit(pool, padding, strides, batch):
    if len(batch) == 2 and not isinstance(padding, str):
        pytest.skip("Flax takes explicit padding with one batch axis only")
    ours, upstream = getattr(nnx, pool), getattr(nnx.pool.__globals__["flax_pooling"], pool)
    arguments = (normal((*batch, 7, 6, 2)), (3, 3), strides, padding)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(ours(*arguments), upstream(*arguments))


@pytest.mark.cases(fast=1, slow=10)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("include", (True, False))
@pytest.mark.parametrize("batch", ((), (2,)))
@pytest.mark.parametrize("strides", (None, (2, 3)))
def test_half_is_float32_rounded_once(dtype, include, batch, strides):
    x = normal((*batch, 9, 8, 2), dtype)
    arguments = ((4, 4), strides, "SAME", include)
    with jax.numpy_dtype_promotion("standard"):
        expected = flax_nn.avg_pool(x.astype(jnp.float32), *arguments).astype(dtype)
    for y in (nn.avg_pool(x, *arguments), jax.jit(lambda x: nn.avg_pool(x, *arguments))(x)):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, expected)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("pool", (nn.max_pool, nnx.max_pool, nnx.min_pool))
@pytest.mark.parametrize(
    "window, strides, dtype", (((3, 3), (2, 2), "bfloat16"), ((5, 5), None, "float32"))
)
def test_gradients_of_maxima_are_summed_in_float32_where_more_than_four_windows_overlap(
    pool, window, strides, dtype
):
    order = jax.random.permutation(jax.random.key(0), 225)  # exact: no ties
    x = order.astype(BFLOAT16).reshape(1, 15, 15, 1)
    weights = 1 + jax.random.uniform(jax.random.key(1), pool(x, window, strides).shape)
    weights = weights.astype(BFLOAT16)

    def loss(x):
        return jnp.sum(pool(x, window, strides).astype(jnp.float32) * weights.astype(jnp.float32))

    expected = np.zeros(x.shape)
    values, chosen = np.asarray(x, np.float64), np.argmax if pool is not nnx.min_pool else np.argmin
    step = strides[0] if strides else 1
    for i, j in np.ndindex(weights.shape[1:3]):
        region = values[0, i * step : i * step + window[0], j * step : j * step + window[1], 0]
        row, column = np.unravel_index(chosen(region), region.shape)
        expected[0, i * step + row, j * step + column, 0] += float(weights[0, i, j, 0])
    gradient = jax.grad(loss)(x)
    assert gradient.dtype == BFLOAT16
    assert_close_in_ulps(gradient, expected, 1.5 if dtype == "bfloat16" else 0.5)
    assert dtypes_of("select_and_", jax.grad(loss), x) == {jnp.dtype(dtype)}


def test_any_reduction_runs_in_float32_and_maxima_of_windows_apart_in_half():
    x = jnp.full((1, 16, 16, 1), 1.02, BFLOAT16)
    y = nn.pool(x, 1.0, lax.mul, (16, 16), None, "VALID")
    assert y.dtype == BFLOAT16
    assert_close_in_ulps(y, np.full(y.shape, float(x[0, 0, 0, 0]) ** 256), 1)
    ones = jnp.ones((1, 32, 32, 1), BFLOAT16)
    for start in (jnp.zeros((), BFLOAT16), np.float32(0)):
        assert float(nn.pool(ones, start, lax.add, (32, 32), None, "VALID").sum()) == 1024
    largest = nn.pool(x, -jnp.inf, lambda a, b: jnp.maximum(a, b), (4, 4), (4, 4), "VALID")
    assert largest.dtype == BFLOAT16 and float(largest[0, 0, 0, 0]) == float(x[0, 0, 0, 0])
    assert dtypes_of("", lambda x: nn.max_pool(x, (2, 2), (2, 2)), x) == {BFLOAT16}


def test_a_policy_says_what_windows_are_summed_in():
    x = normal((1, 8, 8, 2), BFLOAT16)
    with jax.enable_x64(True), use_policy("p=f32,c=bf16,o=f32,reduction=f64"):
        seen = dtypes_of("reduce_window_sum", lambda x: nn.avg_pool(x, (3, 3)), x)
        assert seen == {jnp.dtype("float64")}
        assert nn.avg_pool(x, (3, 3)).dtype == BFLOAT16


def test_integers_average_to_float32_and_large_sums_do_not_overflow_in_float16():
    eights = jnp.full((1, 128, 128, 1), 8.0, jnp.float16)
    assert float(nn.avg_pool(eights, (128, 128))[0, 0, 0, 0]) == 8.0
    integers = jnp.arange(16, dtype=jnp.int32).reshape(1, 4, 4, 1)
    y = nn.avg_pool(integers, (4, 4))
    assert y.dtype == jnp.float32 and float(y[0, 0, 0, 0]) == 7.5
    largest = nn.pool(integers, 0, lax.max, (4, 4), None, "VALID")
    assert largest.dtype == jnp.int32 and int(largest[0, 0, 0, 0]) == 15

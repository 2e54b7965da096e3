"""Keys and values as a cache stores them, beside NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policy import autocast, get_policy, use_policy
from policy.core.quantization import Quantized
from policy.eight_bits.quantization import quantize
from policy.quantized import quantize_cache

X = np.random.default_rng(0).normal(size=(2, 5, 3, 16)).astype(np.float32)
X *= np.exp(3 * np.random.default_rng(1).normal(size=(2, 5, 3, 1))).astype(np.float32)


def in_8_bits(dtype: str) -> Quantized:
    made = quantize_cache(jnp.asarray(X), dtype)
    assert isinstance(made, Quantized) and made.shape == made.qvalue.shape == X.shape
    return made


def rounded_up(x: Any) -> np.ndarray:
    """Positive numbers, rounded to a bfloat16 that is not below them."""
    near = x.astype(ml_dtypes.bfloat16)
    bits = near.view(np.uint16) + (near.astype(np.float64) < x).astype(np.uint16)
    return bits.view(ml_dtypes.bfloat16)


def test_int8_codes_are_quotients_by_a_bfloat16_scale_that_maps_the_largest_to_127():
    made, wide = in_8_bits("int8"), X.astype(np.float64)
    scale = rounded_up(np.float32(abs(X).max(-1, keepdims=True)) / np.float32(127))
    np.testing.assert_array_equal(made.scale, scale)
    assert made.qvalue.dtype == jnp.int8 and made.scale.dtype == jnp.bfloat16
    np.testing.assert_array_equal(made.qvalue, np.rint(X / scale.astype(np.float32)))
    error = abs(np.asarray(made.qvalue, np.float64) * scale.astype(np.float64) - wide)
    assert (error <= 0.5001 * scale.astype(np.float64)).all()  # half a code
    largest = abs(np.asarray(made.qvalue, int)).max(-1)
    assert largest.min() >= 126 and largest.max() == 127  # a bfloat16 rounds up by 1/128


def test_float8_codes_have_scales_that_are_powers_of_two():
    made, wide = in_8_bits("float8"), X.astype(np.float64)
    scale = np.asarray(made.scale, np.float64)
    np.testing.assert_array_equal(
        scale, 2 ** np.ceil(np.log2(abs(wide).max(-1, keepdims=True) / 448))
    )
    np.testing.assert_array_equal(made.qvalue, (wide / scale).astype(ml_dtypes.float8_e4m3fn))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("dtype", "width", "ratio"), [("int8", 64, 1.013), ("int8", 128, 1.007), ("float8", 64, 1)]
)
def test_bfloat16_scales_hardly_add_to_the_error(dtype, width, ratio):
    x = jax.random.normal(jax.random.key(0), (4000, width))

    def error(made: Any) -> float:
        near = np.asarray(made.qvalue, np.float64) * np.asarray(made.scale, np.float64)
        return float(np.sqrt(np.mean(np.square(near - np.asarray(x, np.float64)))))

    made: Any = quantize_cache(x, dtype)
    wide = quantize(x, (1,), made.qvalue.dtype)
    assert wide.scale.dtype == jnp.float32
    np.testing.assert_allclose(error(made) / error(wide), ratio, atol=1e-3)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_zeros_are_zeros_and_what_is_not_finite_makes_its_own_head_nan(dtype):
    made: Any = quantize_cache(jnp.asarray([[0.0, 0.0], [jnp.nan, 1.0], [jnp.inf, 1.0]]), dtype)
    values = made.qvalue.astype(jnp.float32) * made.scale.astype(jnp.float32)
    assert not values[0].any() and jnp.isnan(values[1:]).all()


def test_the_policy_in_force_decides_the_dtype():
    def made(dtype: Any = None) -> list[str]:
        return [x.dtype.name for x in jax.tree.leaves(quantize_cache(x, dtype))]

    x = jnp.ones((3, 4))
    assert made() == ["float32"]
    with use_policy("mixed_bfloat16"):
        assert made() == ["bfloat16"]
    with use_policy("p=f32,c=bf16,k=i8"):
        assert made() == ["int8", "bfloat16"] and made("f32") == ["float32"]
    with pytest.raises(ValueError, match="cache_dtype=int4"):
        quantize_cache(x, jnp.int4)


def test_autocast_leaves_the_quotients_in_float32():
    def codes(x: jax.Array) -> jax.Array:
        made = quantize_cache(x, "int8")
        assert isinstance(made, Quantized)
        return made.qvalue

    cast = autocast(codes, get_policy("mixed_bfloat16"))
    halves = jnp.asarray(X).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(cast(halves), codes(halves))


def test_a_derivative_through_codes_is_rejected():
    def loss(x: jax.Array) -> jax.Array:
        made = quantize_cache(x, "float8")
        assert isinstance(made, Quantized)
        return jnp.sum(made.qvalue.astype(jnp.float32))

    with pytest.raises(NotImplementedError, match=r"in 8 bits has no derivative.* without cache="):
        jax.grad(loss)(jnp.ones((2, 4)))

"""8-bit codes of moments: their numbers, errors and scales, and what is never rounded to 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.optim import blockwise
from policy.optim.blockwise import (
    BLOCK,
    FLOAT8_POSITIVE,
    FLOAT8_SIGNED,
    FORMATS,
    INT8_POSITIVE,
    INT8_SIGNED,
    decode,
    encode,
    scales_shape,
)

ALL = list(FORMATS.values())
every_form = pytest.mark.parametrize("form", ALL, ids=[str(form.dtype) for form in ALL])
KEY = jax.random.key(1)


def numbers(form):
    """The numbers of all codes without a sign, in float64."""
    codes, parts = np.arange(form.largest_code + 1), 2**form.fraction_bits
    exponents, fractions = codes // parts, codes % parts / parts
    small = fractions * 2.0 ** (1 - form.bias)
    return np.where(exponents == 0, small, (1 + fractions) * 2.0 ** (exponents - form.bias))


def draw(form, shape, spread=2.0):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape))).astype(np.float32)
    return x if form.is_signed else x * x


def through(x, form, key=None):
    return np.asarray(decode(*encode(jnp.asarray(x), form, key), form), np.float64)


@every_form
def test_every_code_is_its_sign_exponent_and_fraction_and_comes_back(form):
    signed, truth = np.arange(form.largest_code + 1, dtype=np.uint8), numbers(form)
    if form.is_signed:
        signed, truth = np.concatenate([signed, signed | 128]), np.concatenate([truth, -truth])
    ones = jnp.ones(scales_shape(signed.shape), jnp.float32)
    found = decode(jax.lax.bitcast_convert_type(jnp.asarray(signed), form.dtype), ones, form)
    np.testing.assert_array_equal(np.asarray(found, np.float64), truth)
    if form in (FLOAT8_SIGNED, FLOAT8_POSITIVE):
        np.testing.assert_array_equal(signed.view(form.dtype).astype(np.float64), truth)
    again = np.tile(np.asarray(found)[:, None], BLOCK)
    again[:, -1] = form.largest  # a block of its own for each number, of scale 1
    back, scales = encode(jnp.asarray(again), form)
    np.testing.assert_array_equal(scales, 1.0)
    assert back.dtype == form.dtype
    np.testing.assert_array_equal(np.asarray(back).view(np.uint8)[:, 0], signed)


@pytest.mark.parametrize("shape", [(3, 1000), (24, 256), (300,), (64,), (2, 3, 8, 128), (5, 16)])
@every_form
def test_numbers_are_rounded_to_nearest_beside_the_largest_of_their_block(form, shape):
    x = draw(form, shape, 1.0)
    codes, scales = encode(jnp.asarray(x), form)
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // BLOCK))
    wide = np.pad(np.float64(x), [(0, 0)] * (x.ndim - 1) + [(0, -shape[-1] % BLOCK)])
    largest = np.abs(wide).reshape(*scales.shape, BLOCK).max(-1)
    np.testing.assert_allclose(scales, largest / form.largest, rtol=1e-6)
    of_each = np.repeat(np.float64(scales), BLOCK, -1)[..., : shape[-1]]
    grid = numbers(form)
    gaps = np.abs(np.abs(x)[..., None] / of_each[..., None] - grid)
    nearest = grid[gaps.argmin(-1)]
    if not form.is_signed:
        nearest = np.where(x > 0, np.maximum(nearest, grid[1]), 0)
    found = np.asarray(decode(codes, scales, form), np.float64)
    off = np.abs(found - np.sign(x) * nearest * of_each)
    # ties go either way, as a quotient is rounded
    tie = np.sort(gaps, -1)[..., 1] - gaps.min(-1) < 1e-5 * nearest
    np.testing.assert_array_less(np.where(tie, 0, off), 1e-6 * np.abs(found) + 1e-30)


@every_form
def test_stochastic_rounding_is_right_on_average(form):
    x = draw(form, (16, 128), 0.5)
    keys = jax.random.split(KEY, 500)
    mean = np.mean(jax.lax.map(lambda key: decode(*encode(x, form, key), form), keys), axis=0)
    is_large = np.abs(x) > np.abs(x).max(-1, keepdims=True) * 2.0**-12
    # a step of at most 2^-fraction_bits of the number; 5 deviations of 500 draws
    room = 5 * 0.5 * 2.0**-form.fraction_bits / np.sqrt(500)
    np.testing.assert_allclose(mean[is_large], x[is_large], rtol=room)
    assert abs(np.mean(mean[is_large] / x[is_large]) - 1) < room / 10


@pytest.mark.parametrize("form", [INT8_POSITIVE, FLOAT8_POSITIVE], ids=["uint8", "e5m2"])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_second_moment_above_0_stays_above_0_and_its_root_above_first_moments(form, key):
    x = np.zeros((4, 128), np.float32)
    x[:, 0] = [1.0, 1e-27, 3e38, 2e-38]  # a CPU takes subnormals for 0
    x[:, 1] = [1.2e-38, 1.2e-38, 1e-30, 1.2e-38]
    found = through(x, form, key)
    assert (found[:, :2] > 0).all()
    assert (found[:, 2:] == 0).all()
    np.testing.assert_allclose(found[:3, 0], x[:3, 0], rtol=1e-6)
    first = {INT8_POSITIVE: INT8_SIGNED, FLOAT8_POSITIVE: FLOAT8_SIGNED}[form]
    smallest_root = np.sqrt(numbers(form)[1] / form.largest)
    assert smallest_root > numbers(first)[1] / first.largest
    np.testing.assert_allclose(found[0, 1], numbers(form)[1] / form.largest, rtol=1e-6)


@every_form
@pytest.mark.parametrize("key", [None, KEY])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(form, key):
    x = np.ones((3, 256), np.float32)
    for row, bad in enumerate((np.nan, np.inf, -np.nan)):
        x[row, 5] = bad
    found = through(x, form, key)
    assert np.isnan(found[:, :BLOCK]).all()
    np.testing.assert_array_equal(found[:, BLOCK:], 1.0)


@every_form
def test_the_largest_and_smallest_float32_stay_finite_and_zeros_stay_zeros(form):
    largest = np.full((2, 128), np.finfo(np.float32).max)
    np.testing.assert_allclose(through(largest, form), largest.astype(np.float64), rtol=1e-6)
    for x in (np.zeros((2, 0)), np.zeros((0, 4)), np.zeros((4, 128))):
        assert (through(x.astype(np.float32), form) == 0).all()


@pytest.mark.parametrize("shape", [(24, 256), (2, 8, 128)])
def test_tiles_of_a_tpu_give_the_scales_of_blocks(shape):
    x = draw(INT8_SIGNED, shape)
    tiles = blockwise._from_tiles(blockwise._in_tiles(x).max(-1, keepdims=True))
    np.testing.assert_array_equal(tiles, blockwise._in_blocks(jnp.asarray(x)).max(-1))
    wide = blockwise._from_tiles(jnp.repeat(blockwise._in_tiles(tiles, 1), BLOCK, -1))
    np.testing.assert_array_equal(wide, np.repeat(tiles, BLOCK, -1))


def mean_of_constants(form, rate, key, elements=256, steps=400):
    """Where a mean of constant numbers ends, relative to them, beside a block's constant 1."""
    goal = np.exp2(-np.linspace(0.5, 3.5, elements)).reshape(-1, 1).astype(np.float32)
    goal = jnp.asarray(np.concatenate([np.ones_like(goal), goal], axis=-1))

    def step(stored, count):
        x = decode(*stored, form) * np.float32(rate) + goal * np.float32(1 - rate)
        x = x.at[:, 0].set(1.0)
        return encode(x, form, None if key is None else jax.random.fold_in(key, count)), x

    start = encode(goal.at[:, 1].set(0.0), form)
    _, seen = jax.lax.scan(step, start, jnp.arange(steps))
    return np.mean(np.asarray(seen)[-steps // 4 :, :, 1] / np.asarray(goal)[:, 1], axis=0)


@every_form
def test_means_up_to_the_largest_retention_converge_when_rounded_to_nearest(form):
    assert mean_of_constants(form, form.largest_retention, None).min() > 0.8
    assert mean_of_constants(form, 0.9, None).min() < 0.8


@every_form
def test_stochastic_rounding_follows_a_lone_element_at_any_rate(form):
    ends = mean_of_constants(form, 0.99, KEY, steps=2000)
    np.testing.assert_allclose(ends.mean(), 1, atol=0.02)
    stuck = mean_of_constants(form, 0.99, None, steps=2000)
    assert stuck.mean() < 0.6

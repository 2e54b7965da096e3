"""Rounding: to nearest and apart again, for every bit pattern, and stochastically."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from policy import NoOpLossScale, apply_gradients, master_params, mixed_precision
from policy.inspect.ulps import spacing
from policy.optim.rounding import join_master, pack, packed, round_stochastically, round_to, split
from policy.optim.storage_modes import KAHAN
from policy.testing import assert_close_in_ulps

RNG = np.random.default_rng(0)
HALF = [jnp.bfloat16, jnp.float16]
# numpy warns of signalling NaNs, which are among all bit patterns
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
EVERY_16_BITS = np.arange(2**16, dtype=np.uint16)
FLOATS = np.concatenate(
    [
        RNG.integers(0, 2**32, 20000, dtype=np.uint32),
        (np.arange(2**16, dtype=np.uint32) << 16) + np.uint32(0x8000),
        np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32),
    ]
).view(np.float32)  # any, every tie, NaN and infinity


def test_bfloat16_is_rounded_half_away_from_zero():
    one, ulp = np.float32(1), np.float32(2.0**-7)
    x = jnp.asarray(
        [1, 1 + ulp / 2, -1 - ulp / 2, one + ulp * 0.499, one + ulp * 1.5, 0.0, -0.0, 2.0**-140],
        jnp.float32,
    )
    largest = np.float32(jnp.finfo(jnp.bfloat16).max)
    assert round_to(jnp.array([largest]), jnp.bfloat16)[0] == jnp.bfloat16(largest)
    rounded: jax.Array = jax.jit(lambda x: round_to(x, jnp.bfloat16))(x)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        rounded.astype(jnp.float32)[:7],
        np.asarray([1, 1 + ulp, -1 - ulp, 1, 1 + 2 * ulp, 0, -0.0], np.float32),
    )
    assert np.signbit(np.asarray(rounded, np.float32)[6])


def test_a_float32_is_the_same_after_it_was_taken_apart():
    param, low = split(pack(jnp.asarray(FLOATS)))
    rounded = round_to(jnp.asarray(FLOATS), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(param, np.float32), np.asarray(rounded, np.float32))
    np.testing.assert_array_equal(jnp.isnan(param), np.isnan(FLOATS))
    assert jnp.isinf(param[np.isinf(FLOATS)]).all()
    joined = np.asarray(join_master(param, low))
    np.testing.assert_array_equal(np.isnan(joined), np.isnan(FLOATS))
    numbers = ~np.isnan(FLOATS)
    np.testing.assert_array_equal(joined.view(np.uint32)[numbers], FLOATS.view(np.uint32)[numbers])


@pytest.mark.parametrize("low", [0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_a_written_param_beside_a_stale_low_half_is_honoured_to_within_an_ulp(low):
    param = jnp.asarray(EVERY_16_BITS.view(ml_dtypes.bfloat16))
    stale = jnp.full(param.shape, low, jnp.uint16)
    joined = np.asarray(jax.jit(join_master)(param, stale)).astype(np.float64)
    exact = np.asarray(param).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(joined), np.isnan(exact))
    finite = np.isfinite(exact)
    assert np.isfinite(joined[finite]).all()
    assert_close_in_ulps(joined[finite], exact[finite], 0.5, jnp.bfloat16)
    # a step that changes nothing keeps every bit, NaN's too
    for kept, was in zip(split(packed(param, stale)), (param, stale), strict=True):
        np.testing.assert_array_equal(
            np.asarray(kept).view(np.uint16), np.asarray(was).view(np.uint16)
        )


@pytest.mark.parametrize("dtype", HALF)
def test_a_written_param_beside_a_stale_kahan_term_is_honoured_to_within_an_ulp(dtype):
    param = jnp.asarray(EVERY_16_BITS.view(dtype))
    stale = jnp.asarray(RNG.permutation(EVERY_16_BITS).view(dtype))
    wide = np.asarray(jax.jit(KAHAN.join)(param, stale)).astype(np.float64)
    exact = np.asarray(param).astype(np.float64)
    finite = np.isfinite(exact)
    assert np.isfinite(wide[finite]).all()
    tiny = float(jnp.finfo(dtype).tiny)
    allowed = np.where(
        np.abs(exact) < tiny, tiny, spacing(exact, dtype)
    )  # XLA may take a subnormal number for 0
    assert (np.abs(wide - exact)[finite] <= allowed[finite]).all()
    held = KAHAN.decode(KAHAN.encode_same(param, stale), jnp.dtype(dtype))
    for kept, was in zip(held, (param, stale), strict=True):
        np.testing.assert_array_equal(
            np.asarray(kept).view(np.uint16), np.asarray(was).view(np.uint16)
        )


NAN_BITS = [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF]  # quiet, negative, signalling, all ones
STORED = [
    ("remainder", "bfloat16"),
    *itertools.product(["kahan", "full", "stochastic", "none"], ["bfloat16", "float16"]),
]


@pytest.mark.parametrize(("mode", "dtype"), STORED)
def test_no_value_written_to_a_param_makes_another_non_finite(mode, dtype):
    params = jnp.asarray(RNG.normal(size=64), dtype)
    key = jax.random.key(0) if mode == "stochastic" else None
    none = NoOpLossScale()
    tx = mixed_precision(optax.adamw(1e-2), dtype, loss_scale=none, master_weights=mode, key=key)
    step = jax.jit(lambda p, s: apply_gradients(tx, p, s, jnp.ones(64))[:2])
    params, state = step(params, tx.init(params))
    half = np.arange(64) % 2 == 0
    pruned = jnp.where(RNG.random(64) < 0.5, jnp.zeros_like(params), params)
    nans = [
        jax.lax.bitcast_convert_type(jnp.full(64, bits, jnp.uint16), dtype) for bits in NAN_BITS
    ]
    constants = [jnp.full_like(params, value) for value in (0.0, -0.0, 1.0)]
    for value in (*constants, pruned, *nans):
        stepped, after = jnp.where(half, value, params), state
        bad = np.isnan(np.asarray(stepped, np.float32))
        for _ in range(3):
            stepped, after = step(stepped, after)
            for result in (stepped, master_params(stepped, after)):
                finite = np.isfinite(np.asarray(result, np.float32))
                if mode == "full":  # whose master, not the param, is the truth
                    assert finite.all()
                else:
                    np.testing.assert_array_equal(finite, ~bad)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "value", [1.0009, -3.3333, 2.0**-14 * 1.3, 2.0**-17 * 1.77, -(2.0**-24) * 1.3, 60000.7]
)
def test_stochastic_rounding_gives_the_two_neighbours_and_the_value_on_average(dtype, value):
    count = 2**14
    x = jnp.full((128, count // 128), value, jnp.float32)
    rounded = np.asarray(round_stochastically(x, dtype, jax.random.key(1))).astype(np.float64)
    exact = float(np.float32(value))
    low, high = np.unique(rounded)
    assert low < exact < high
    toward = np.asarray(jnp.nextafter(jnp.asarray(low, dtype), jnp.asarray(np.inf, dtype))).astype(
        np.float64
    )
    assert toward == high
    probability = (exact - low) / (high - low)
    sigma = (high - low) * (probability * (1 - probability) / count) ** 0.5
    assert (
        abs(rounded.mean() - exact) < 4 * sigma + (high - low) * 2.0**-12
    )  # 13 and 16 random bits
    # rows and columns are not alike
    up = rounded == high
    assert np.abs(up.mean(0) - probability).max() < 6 * (0.25 / 128) ** 0.5
    assert np.abs(up.mean(1) - probability).max() < 6 * (0.25 / 128) ** 0.5


@pytest.mark.parametrize("dtype", HALF)
def test_stochastic_rounding_leaves_what_fits_and_never_overflows_a_number(dtype):
    exact = jnp.asarray(EVERY_16_BITS.view(dtype))
    rounded = round_stochastically(exact.astype(jnp.float32), dtype, jax.random.key(2))
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(exact, np.float32))
    info = jnp.finfo(dtype)
    beyond = jnp.full(4096, np.float32(info.max) * np.float32(1 + float(info.eps) / 8))
    np.testing.assert_array_equal(round_stochastically(beyond, dtype, jax.random.key(3)), info.max)


def test_stochastic_rounding_draws_anew_for_each_step_leaf_and_mapped_part():
    params = {"a": jnp.ones(512, jnp.bfloat16), "b": jnp.ones(512, jnp.bfloat16)}
    half = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-9), params)  # half of the ulp below 1

    def rounded(params, steps=1, key=0, axis_name=None):
        raw = jax.random.PRNGKey(key)  # the old kind of key
        tx = mixed_precision(
            optax.sgd(1.0), "bfloat16", master_weights="stochastic", key=raw, axis_name=axis_name
        )
        state = tx.init(params)._replace(count=jnp.int32(steps))
        return apply_gradients(tx, params, state, half)[0]

    first = rounded(params)
    assert 0.4 < (first["a"] < 1).mean() < 0.6
    for one, other in (
        (first["a"], first["b"]),
        (first["a"], rounded(params, 2)["a"]),
        (first["a"], rounded(params, key=1)["a"]),
    ):
        assert 0.4 < (one == other).mean() < 0.6
    jax.tree.map(np.testing.assert_array_equal, first, rounded(params))
    lanes = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    parts = jax.vmap(lambda p: rounded(p, axis_name="i"), axis_name="i")(lanes)
    assert 0.4 < (parts["a"][0] == parts["a"][1]).mean() < 0.6

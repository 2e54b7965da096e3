"""Float32 values in half-precision params: rounding and storage modes, each one record, and master
weights, which move as in float32 and never drift from their params.
"""

import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

from policy import apply_gradients, init_from_master, master_params, mixed_precision
from policy.optim import convert, resync, storage_modes
from policy.optim.storage_modes import (
    STORAGE_MODES,
    MasterWeights,
    ParamUpdate,
    StorageMode,
    halves,
    join_master,
    pack,
    round_stochastically,
    round_to,
    storage_code,
    storage_text,
)
from policy.testing import assert_close_in_ulps
from tests.policy.optim.steps import BOTH_WAYS, assert_same, dtypes, stepped, wrapped

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
    ulp = 2.0**-7
    x = [1, 1 + ulp / 2, -1 - ulp / 2, 1 + ulp * 0.499, 1 + ulp * 1.5, 0.0, -0.0]
    rounded: jax.Array = jax.jit(lambda x: round_to(x, jnp.bfloat16))(jnp.asarray(x, jnp.float32))
    expected = [1, 1 + ulp, -1 - ulp, 1, 1 + 2 * ulp, 0, -0.0]
    assert_same(rounded, jnp.asarray(expected, jnp.bfloat16))
    largest = jnp.finfo(jnp.bfloat16).max
    assert round_to(jnp.array([largest], jnp.float32), jnp.bfloat16)[0] == largest


@pytest.mark.slow
def test_a_float32_is_the_same_after_it_was_taken_apart():
    param, low = halves(pack(jnp.asarray(FLOATS)))
    rounded = round_to(jnp.asarray(FLOATS), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(param, np.float32), np.asarray(rounded, np.float32))
    np.testing.assert_array_equal(jnp.isnan(param), np.isnan(FLOATS))
    assert jnp.isinf(param[np.isinf(FLOATS)]).all()
    joined = np.asarray(join_master(param, low))
    np.testing.assert_array_equal(np.isnan(joined), np.isnan(FLOATS))
    assert_same(joined[~np.isnan(FLOATS)], FLOATS[~np.isnan(FLOATS)])


@pytest.mark.slow
def test_halves_taken_in_turn_are_the_halves():
    """TPUs take the low half of a pair from the high one."""
    pair = pack(jnp.asarray(FLOATS))
    (high, low), expected = storage_modes._halves_in_turn(pair), halves(pair)
    assert_same(low, expected[1])
    is_nan = jnp.isnan(expected[0])  # a NaN may lose its payload
    np.testing.assert_array_equal(jnp.isnan(high), is_nan)
    assert_same(jnp.where(is_nan, 0, high), jnp.where(is_nan, 0, expected[0]))


def test_a_moment_that_is_written_with_both_halves_keeps_every_bit():
    moment = jnp.asarray(FLOATS)
    for pair in (pack(moment), jax.random.bits(jax.random.key(0), moment.shape)):
        tied = storage_modes._tied(moment, pair)
        assert_same(*(lax.bitcast_convert_type(x, jnp.uint32) for x in (tied, moment)))
    slope = jax.grad(lambda x: storage_modes._tied(x, jnp.zeros(3, jnp.uint32)).sum())(jnp.ones(3))
    assert_same(slope, jnp.ones(3))


@pytest.mark.parametrize("tree", [{"a": (3, 4), "b": (2,)}, (3,)])
@pytest.mark.parametrize(
    "inner, is_tied",
    [
        (optax.adamw(0.1), True),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), True),
        (optax.sgd(0.1), False),
        (optax.adamw(0.1, mu_dtype=jnp.bfloat16), False),
    ],
)
def test_on_tpus_the_first_moment_of_each_remainder_is_written_with_its_halves(
    tree, inner, is_tied
):
    params = jax.tree.map(
        lambda shape: jnp.ones(shape, jnp.bfloat16), tree, is_leaf=lambda x: isinstance(x, tuple)
    )
    tx = mixed_precision(inner, "bfloat16")

    def texts(of):
        step = jax.jit(lambda params, state: apply_gradients(of, params, state, params))
        lowered = step.trace(params, of.init(params)).lower(lowering_platforms=("tpu",))
        return lowered.as_text()

    found = texts(tx).count("stablehlo.xor")
    without = texts(mixed_precision(optax.sgd(0.1), "bfloat16")).count("stablehlo.xor")
    # of the halves, of their pair, and of the moment
    assert found - without == 3 * len(jax.tree.leaves(params)) * is_tied


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("low", [0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_a_written_param_beside_a_stale_low_half_is_honored_to_within_an_ulp(low):
    param = jnp.asarray(EVERY_16_BITS.view(ml_dtypes.bfloat16))
    stale = jnp.full(param.shape, low, jnp.uint16)
    joined = np.asarray(jax.jit(join_master)(param, stale)).astype(np.float64)
    exact = np.asarray(param).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(joined), np.isnan(exact))
    finite = np.isfinite(exact)
    assert np.isfinite(joined[finite]).all()
    assert_close_in_ulps(joined[finite], exact[finite], 0.5, jnp.bfloat16)
    # a step that changes nothing keeps every bit, NaN's too
    update = ParamUpdate.of(jnp.bfloat16, "remainder", as_update=False)
    pair: Any = update.skipped(param, stale)
    assert_same(halves(pair), (param, stale))


NAN_BITS = [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF]  # quiet, negative, signalling, all ones
STORED = [
    ("remainder", "bfloat16"),
    *itertools.product(["full", "stochastic", "none"], ["bfloat16", "float16"]),
]


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize(("mode", "dtype"), STORED)
def test_no_value_written_to_a_param_makes_another_non_finite(mode, dtype):
    params = jnp.asarray(RNG.normal(size=64), dtype)
    tx = wrapped(optax.adamw(1e-2), dtype, mode)
    step = jax.jit(lambda p, s: stepped(tx, p, s, jnp.ones(64)))
    params, state = step(params, tx.init(params))
    nans = [lax.bitcast_convert_type(jnp.full(64, b, jnp.uint16), dtype) for b in NAN_BITS]
    pruned = jnp.where(RNG.random(64) < 0.5, jnp.zeros_like(params), params)
    constants = [jnp.full_like(params, value) for value in (0.0, -0.0, 1.0)]
    for value in (*constants, pruned, *nans):
        new, after = jnp.where(np.arange(64) % 2 == 0, value, params), state
        bad = np.isnan(np.asarray(new, np.float32))
        for _ in range(3):
            new, after = step(new, after)
            for result in (new, master_params(new, after)):
                finite = np.isfinite(np.asarray(result, np.float32))
                # a full master, not the param, is the truth
                np.testing.assert_array_equal(finite, ~bad if mode != "full" else True)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "value", [1.0009, -3.3333, 2.0**-14 * 1.3, 2.0**-17 * 1.77, -(2.0**-24) * 1.3, 60000.7]
)
def test_stochastic_rounding_gives_the_two_neighbors_and_the_value_on_average(dtype, value):
    count = 2**14
    x = jnp.full((128, count // 128), value, jnp.float32)
    rounded = np.asarray(round_stochastically(x, dtype, jax.random.key(1))).astype(np.float64)
    exact = float(np.float32(value))
    low, high = np.unique(rounded)
    assert low < exact < high
    assert float(jnp.nextafter(jnp.asarray(low, dtype), jnp.asarray(np.inf, dtype))) == high
    probability = (exact - low) / (high - low)
    sigma = (high - low) * (probability * (1 - probability) / count) ** 0.5
    # 13 and 16 random bits
    assert abs(rounded.mean() - exact) < 4 * sigma + (high - low) * 2.0**-12
    for axis in (0, 1):  # rows and columns are not alike
        off = np.abs((rounded == high).mean(axis) - probability)
        assert off.max() < 6 * (0.25 / 128) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_stochastic_rounding_leaves_what_fits_and_never_overflows_a_number(dtype):
    exact = jnp.asarray(EVERY_16_BITS.view(dtype))
    rounded = round_stochastically(exact.astype(jnp.float32), dtype, jax.random.key(2))
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(exact, np.float32))
    info = jnp.finfo(dtype)
    beyond = jnp.full(4096, np.float32(info.max) * np.float32(1 + float(info.eps) / 8))
    np.testing.assert_array_equal(round_stochastically(beyond, dtype, jax.random.key(3)), info.max)


@pytest.mark.slow
def test_stochastic_rounding_draws_anew_for_each_step_leaf_and_mapped_part():
    params = {"a": jnp.ones(512, jnp.bfloat16), "b": jnp.ones(512, jnp.bfloat16)}
    half = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-9), params)  # half of the ulp below 1

    def rounded(params, steps=1, key=0, axis_name=None):
        raw = jax.random.PRNGKey(key)  # the old kind of key
        tx = wrapped(optax.sgd(1.0), mode="stochastic", key=raw, axis_name=axis_name)
        return stepped(tx, params, tx.init(params)._replace(count=jnp.int32(steps)), half)[0]

    first = rounded(params)
    assert 0.4 < (first["a"] < 1).mean() < 0.6
    lanes = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    parts = jax.vmap(lambda p: rounded(p, axis_name="i"), axis_name="i")(lanes)["a"]
    others = first["b"], rounded(params, 2)["a"], rounded(params, key=1)["a"]
    for one, other in (*((first["a"], other) for other in others), (parts[0], parts[1])):
        assert 0.4 < (one == other).mean() < 0.6
    assert_same(first, rounded(params))


WIDE = {"w": jnp.linspace(-2.1, 3.3, 12).reshape(3, 4)}
GRADIENTS = {"w": jnp.full((3, 4), 0.5)}


def _encode(value: jax.Array, dtype: np.dtype, key: jax.Array | None) -> Any:
    param = round_to(value, dtype)
    return param, (value - param.astype(jnp.float32)).astype(jnp.float16)


# the rounding error in float16, which no mode stores; records hold names that types don't list
ERROR = StorageMode(
    name="error",  # pyright: ignore[reportArgumentType]
    code=17,
    init=lambda param: jnp.zeros_like(param, jnp.float16),
    join=lambda param, error: param.astype(jnp.float32) + error.astype(jnp.float32),
    encode=_encode,
    stored_dtype=np.dtype("float16"),
)


@pytest.fixture
def other_mode(monkeypatch) -> Any:
    monkeypatch.setitem(storage_modes.STORAGE_MODES, "error", ERROR)
    return "error"


def test_every_record_is_listed_under_its_name_with_a_code_of_its_own():
    assert get_args(MasterWeights) == ("auto", *STORAGE_MODES)
    for name, mode in STORAGE_MODES.items():
        assert mode.name == name
        assert mode.stores == (mode.code > 0)
    codes = [mode.code for mode in STORAGE_MODES.values() if mode.stores]
    assert sorted(codes) == [1, 2]  # checkpoints hold them


@pytest.mark.slow
def test_another_record_is_a_mode(other_mode):
    tx, full = (wrapped(optax.sgd(0.0, momentum=0.9), "bfloat16", m) for m in (other_mode, "full"))
    params, state = init_from_master(tx, WIDE)
    assert state.masters["w"].dtype == jnp.float16
    close = {"rtol": 2.0**-16, "atol": 0}
    np.testing.assert_allclose(master_params(params, state)["w"], WIDE["w"], **close)
    for _ in range(2):
        params, state, finite = apply_gradients(tx, params, state, GRADIENTS)
        assert finite
    np.testing.assert_allclose(master_params(params, state)["w"], WIDE["w"], **close)
    updates, _ = tx.update(GRADIENTS, state, params)
    np.testing.assert_array_equal(updates["w"], 0)
    migrated = convert(state, params, to=full)
    np.testing.assert_allclose(migrated.masters["w"], WIDE["w"], **close)
    assert_same(convert(migrated, params, to=tx).masters, state.masters)
    np.testing.assert_array_equal(resync(params, state).masters["w"], 0)


def test_codes_tell_every_storage_of_every_pair_of_dtypes_apart(other_mode):
    both = ["bfloat16", "float16"]
    pairs = itertools.product(("full", other_mode), (both[:1], both[1:], both))
    assert len({storage_code(dtypes, mode) for mode, dtypes in pairs}) == 6
    assert storage_text(storage_code(both, other_mode)) == "error for bfloat16, error for float16"
    assert storage_text(storage_code(both, "auto")) == "remainder for bfloat16, full for float16"
    assert storage_text(storage_code(["float16"], "none")) == "nothing"
    assert storage_text(99) == "an unknown storage (99)"


def gradients_for(params: Any, steps: int) -> Any:
    """Returns gradients of many magnitudes, the same for all params."""
    rng = np.random.default_rng(1)

    def one(p):
        sizes = 10 ** rng.uniform(-6, 2, (steps, *[1] * p.ndim))
        return jnp.asarray(rng.normal(size=(steps, *p.shape)) * sizes, jnp.float32)

    return jax.tree.map(one, params)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (jnp.float32, "auto"),
        (jnp.bfloat16, "remainder"),
        (jnp.bfloat16, "full"),
        (jnp.float16, "full"),
    ],
)
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
def test_adamw_masters_equal_plain_float32_optax_bit_for_bit(dtype, mode, through_optax):
    steps = 1000
    params = {"b": RNG.normal(size=7), "w": RNG.normal(size=(3, 5))}
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)
    gradients = gradients_for(params, steps)
    adamw = optax.adamw(optax.cosine_decay_schedule(1e-2, steps), weight_decay=1e-2)
    tx = wrapped(adamw, jnp.dtype(dtype).name, mode, loss_scale="dynamic")

    def ours(carry, gradient):
        params, state = stepped(tx, *carry, gradient, through_optax)
        return (params, state), (params, master_params(params, state))

    def plain(wide, state, gradient):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(gradient, state, wide)
            return apply(wide, updates), state

    # Where params are float32, optax's contract rounds the update before it is added; XLA would
    # fuse the two into one rounding in plain optax. In all other cases masters are as in the fused
    # step.
    apart = through_optax and dtype == jnp.float32
    update: Any = jax.jit(adamw.update) if apart else adamw.update
    apply = jax.jit(optax.apply_updates) if apart else optax.apply_updates
    step_plain: Any = plain if apart else jax.jit(plain)

    _, (stored, masters) = jax.lax.scan(ours, (params, tx.init(params)), gradients)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, expected = adamw.init(wide), []
    rows = jax.tree.map(np.asarray, gradients)
    # not a scan: XLA compiles plain optax's body differently there, by an ulp
    for step in range(steps):
        wide, state = step_plain(wide, state, jax.tree.map(lambda g, step=step: g[step], rows))
        expected.append(wide)
    jax.tree.map(lambda m, *e: np.testing.assert_array_equal(m, np.stack(e)), masters, *expected)
    # and the params are the rounded master after every step
    assert set(dtypes(stored)) == {jnp.dtype(dtype).name}
    jax.tree.map(lambda p, m: np.testing.assert_array_equal(p, round_to(m, dtype)), stored, masters)


HALF_MODES = ["auto", "full", "stochastic", "none"]


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize(("dtype", "mode"), [*itertools.product(HALF, HALF_MODES)])
def test_a_thousand_small_steps_move_a_half_precision_weight_unless_it_has_no_master(dtype, mode):
    params = jnp.ones(256, dtype)
    tx = wrapped(optax.sgd(1e-4), "bfloat16", mode)
    step = lambda carry, _: (stepped(tx, *carry, jnp.ones(256)), None)  # noqa: E731
    (end, state), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=1000)
    ulp = float(jnp.finfo(dtype).eps) / 2  # below 1
    moved = np.asarray(master_params(end, state)).mean()
    # stochastic: each element walks at random by ulps, with a variance of 1000 · 1e-4 · ulp; four
    # sigma of the mean
    by_chance = 4 * (0.1 * ulp / 256) ** 0.5
    allowed = by_chance if mode == "stochastic" else 3e-5
    assert abs(moved - (1.0 if mode == "none" else 0.9)) < allowed
    np.testing.assert_allclose(end.astype(jnp.float32).mean(), moved, atol=ulp)


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize(
    ("mode", "dtype", "bits"),
    [
        ("remainder", "bfloat16", 24),
        ("full", "bfloat16", 24),
        ("full", "float16", 24),
        ("stochastic", "bfloat16", 8),
        ("none", "bfloat16", 8),
    ],
)
def test_init_from_master_keeps_the_low_bits(mode, dtype, bits):
    wide = {
        "w": jnp.asarray(RNG.uniform(1, 2, size=50), jnp.float32),
        "_overwrite_with_gradient": {"s": jnp.ones(2)},
    }
    tx = wrapped(None, dtype, mode)
    params, state = init_from_master(tx, wide)
    assert params["_overwrite_with_gradient"]["s"].dtype == jnp.float32
    masters = jax.tree.map(np.array, master_params(params, state))
    np.testing.assert_allclose(masters["w"], wide["w"], rtol=0 if bits == 24 else 2.0**-bits)
    np.testing.assert_array_equal(masters["_overwrite_with_gradient"]["s"], 1)
    assert_same(params["w"], round_to(wide["w"], dtype))
    step = jax.jit(lambda p, s, g: stepped(tx, p, s, g), donate_argnums=(0, 1))
    after = step(params, state, jax.tree.map(jnp.zeros_like, wide))
    assert_same(master_params(*after)["w"], masters["w"])
    assert jnp.isfinite(wide["w"]).all()  # donation took none of the caller's


def test_init_from_master_makes_no_master_of_float32_params_and_narrows_wider_ones():
    params, state = init_from_master(wrapped(None, "mixed_bfloat16"), {"w": jnp.ones(3)})
    assert params["w"].dtype == jnp.float32
    assert not jax.tree.leaves(state.masters)
    with jax.enable_x64(True):
        wide = {"w": jnp.full(3, 1 / 3, jnp.float64)}
        params, state = init_from_master(wrapped(None, "bfloat16"), wide)
        np.testing.assert_array_equal(master_params(params, state)["w"], np.float32(1 / 3))


def test_resync_follows_what_was_written_and_keeps_the_rest():
    params = {"w": jnp.ones(4, jnp.bfloat16), "v": jnp.ones(2)}
    tx = wrapped(optax.sgd(1e-3), "bfloat16", "full")
    gradients = {"w": jnp.ones(4), "v": jnp.ones(2)}
    params, state = stepped(tx, params, tx.init(params), gradients)
    low = np.float32(1) - np.float32(1e-3)
    np.testing.assert_array_equal(state.masters["w"], low)
    written = {**params, "w": params["w"].at[0].set(0.5).at[1].set(jnp.nan)}
    state = jax.jit(resync)(written, state)
    np.testing.assert_array_equal(
        state.masters["w"], np.asarray([0.5, np.nan, low, low], np.float32)
    )
    assert state.count == 1


def test_resync_starts_from_the_params_where_nothing_tells_what_was_written():
    params = jnp.ones(4, jnp.bfloat16)
    tx = wrapped(optax.sgd(1e-3), "bfloat16", "remainder")
    params, state = stepped(tx, params, tx.init(params), jnp.ones(4))
    written = params.at[0].set(1.5)
    assert 0 < abs(master_params(written, state)[0] - 1.5) <= 2.0**-7  # the low bits are stale
    assert_same(master_params(written, resync(written, state)), written.astype(jnp.float32))


@pytest.mark.slow
def test_a_full_master_hands_its_low_bits_to_a_remainder_when_float16_becomes_bfloat16():
    wide = jnp.asarray(RNG.normal(size=50), jnp.float32)
    params, state = init_from_master(wrapped(None, "float16"), wide)
    cast = round_to(master_params(params, state), jnp.bfloat16)
    state = resync(cast, state)
    assert state.masters.dtype == jnp.uint16
    assert_same(master_params(cast, state), wide)


@pytest.mark.slow
def test_a_changed_dtype_is_rejected_by_name_and_resync_accepts_it():
    params = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3, jnp.bfloat16)}
    tx = wrapped(None, "bfloat16")
    state, gradients = tx.init(params), jax.tree.map(lambda p: jnp.ones(p.shape), params)
    text = (
        r"changed since the optimizer state was made: a/w was float32\[2\] and is bfloat16\[2\]\. "
        r".* call resync\(params, state\)"
    )
    cast = {"a": {"w": jnp.ones(2, jnp.bfloat16)}, "b": params["b"]}
    other_half = {"a": params["a"], "b": params["b"].astype(jnp.float16)}
    for changed, told in ((cast, text), (other_half, r"b was bfloat16\[3\] and is float16")):
        for call in (
            lambda p: apply_gradients(tx, p, state, gradients),
            lambda p: tx.update(gradients, state, p),
            lambda p: master_params(p, state),
        ):
            with pytest.raises(ValueError, match=told):
                call(changed)
        new, after = stepped(tx, changed, resync(changed, state), gradients)
        assert dtypes(new) == dtypes(changed)
        assert after.count == 1

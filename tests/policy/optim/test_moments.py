"""`moment_dtype`: which moments are stored narrow, how well they do, and which are rejected; and
the 8-bit codes, their numbers, errors and scales.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import apply_gradients
from policy.core.quantization import Quantized
from policy.optim import blockwise, convert
from policy.optim.blockwise import (
    BLOCK,
    FORMATS,
    LARGEST_DECAY,
    POSITIVE,
    SIGNED,
    decode,
    encode,
)
from policy.optim.moments import stored_forms, upcast_moments
from tests.policy.optim.steps import assert_same, dtypes, stepped, types, wrapped

KEY = jax.random.key(0)
PARAMS = {"w": jnp.full((2, 3), 1.5)}
GRADIENTS = {"w": jnp.full((2, 3), 0.3)}


def fields(tx: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tx.init(PARAMS).inner)
    return {
        [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]: str(leaf.dtype)
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(
    ("tx", "narrow"),
    [
        (optax.adamw(1e-3), "mu"),
        (optax.lion(1e-3), "mu"),
        (optax.adan(1e-3), "m"),
        (optax.sgd(1e-3, momentum=0.9), "trace"),
        (optax.ema(0.9), "ema"),
        (optax.contrib.ademamix(1e-3), "m1"),
        (optax.contrib.prodigy(), "exp_avg"),
        (optax.MultiSteps(optax.adam(1e-3), 3), "mu"),
        (optax.masked(optax.adam(1e-3), {"w": True}), "mu"),
        (optax.inject_hyperparams(optax.adam)(1e-3), "mu"),
    ],
)
def test_a_dtype_means_the_first_moments_and_nothing_else(tx, narrow):
    ours = fields(wrapped(tx, moment_dtype="bfloat16"))
    assert ours == {**fields(wrapped(tx)), narrow: "bfloat16"}


class Named(NamedTuple):
    mu: Any
    nu: Any


@pytest.mark.slow
def test_a_param_that_is_called_as_a_moment_is_none():
    params = Named(jnp.ones(2), jnp.ones(3))
    state = wrapped(moment_dtype="bfloat16").init(params).inner[0]
    assert (set(dtypes(state.mu)), set(dtypes(state.nu))) == ({"bfloat16"}, {"float32"})


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("key", [None, KEY])
def test_moments_keep_their_dtype_in_a_scan_and_are_computed_in_float32(key):
    seen = []
    adam = optax.adam(1e-2)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(state[0].mu["w"].dtype)
        return adam.update(updates, state, params)

    tx = wrapped(optax.GradientTransformation(adam.init, update), moment_dtype="bfloat16", key=key)
    step: Any = lambda carry, _: (stepped(tx, *carry, GRADIENTS), None)  # noqa: E731
    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, length=20)
    assert set(seen) == {jnp.dtype(jnp.float32)}
    mu = state.inner[0].mu["w"]
    assert mu.dtype == jnp.bfloat16
    # each step rounds by half an ulp of bfloat16 at most, and forgets a tenth of it: 10 · 2^-9
    exact = 0.3 * (1 - 0.9**20)
    np.testing.assert_allclose(np.asarray(mu, np.float64), exact, rtol=10 * 2.0**-9)
    np.testing.assert_allclose(params["w"], 1.5 - 20 * 1e-2, rtol=1e-3)


@pytest.mark.slow
def test_a_bfloat16_second_moment_decays_with_stochastic_rounding():
    params, gradients = jnp.ones(4096), jnp.zeros(4096)
    tx = wrapped(optax.scale_by_rms(decay=0.999), moment_dtype={"nu": "bfloat16"}, key=KEY)
    state = tx.init(params)
    state = state._replace(inner=state.inner._replace(nu=jnp.ones(4096, jnp.bfloat16)))
    step: Any = lambda state, _: (stepped(tx, params, state, gradients)[1], None)  # noqa: E731
    end: Any = jax.lax.scan(step, state, None, length=1000)[0]
    np.testing.assert_allclose(np.float64(end.inner.nu).mean(), 0.999**1000, rtol=0.02)


def test_a_moment_beyond_float16_is_its_largest_number():
    tx, params = wrapped(optax.trace(0.9), moment_dtype="float16"), jnp.ones(2)
    _, state = stepped(tx, params, tx.init(params), jnp.asarray([1e6, -1e6]))
    assert state.finite
    assert_same(state.inner.trace, np.asarray([65504, -65504], np.float16))


ADAM, BF16, SUM = optax.adam(1e-3), "bfloat16", "the field is a running sum"
COPY = "the field is a copy of the params"
Z, RATE = {"z": BF16}, r"'nu' is bfloat16, but its decay rate is 0\.999\. Above 0\.98, rounding"
SQUARES = {"sum_of_squares": BF16}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("tx", "moment_dtype", "key", "text"),
    [
        (ADAM, {"nu": BF16}, None, RATE),
        (optax.MultiSteps(ADAM, 3), {"nu": BF16}, None, RATE),
        # at a count of 1e5
        (optax.scale_by_factored_rms(decay_rate=0.8), {"v": BF16}, None, "decay rate is 0.9999"),
        (optax.adagrad(1e-3), SQUARES, KEY, SUM),
        (optax.sm3(1e-3, momentum=0.0), BF16, None, SUM),
        (optax.contrib.schedule_free_sgd(1e-3), Z, None, COPY),
        (ADAM, {"n": BF16}, None, "has no field 'n'. Its fields: count, mu, nu"),
        (optax.sgd(1e-3), BF16, None, "has no first moment. Its fields: none"),
        (
            ADAM,
            "int16",
            None,
            "should be bfloat16, float16, float32 or 'int8', but got",
        ),
        (ADAM, {"nu": "float16"}, None, "'nu' is float16, in which the square of 256 overflows"),
        (ADAM, "int8", None, r"'mu' is 8 bits, but its decay rate is 0\.9\. Above 0\.69"),
        (ADAM, {"nu": "int8"}, None, "'nu' is 8 bits, but its decay rate is 0.999"),
        (ADAM, "float8", None, "float32 or 'int8', but got 'float8'"),
        (optax.adan(1e-3), {"v": "int8"}, KEY, "'v' is 8 bits, which store a sign .* negative"),
        (optax.adagrad(1e-3), {"sum_of_squares": "int8"}, KEY, SUM),
    ],
)
def test_moments_that_cannot_be_narrow_are_rejected_by_name(tx, moment_dtype, key, text):
    with pytest.raises(ValueError, match=text):
        wrapped(tx, moment_dtype=moment_dtype, key=key).init(PARAMS)


def test_fields_that_cannot_be_tried_are_first_moments_by_their_names():
    needs: Any = lambda updates, state, params=None, *, value: (updates, state)  # noqa: E731
    start: Any = lambda params: Named(*[jax.tree.map(jnp.zeros_like, params)] * 2)  # noqa: E731
    odd = optax.GradientTransformationExtraArgs(start, needs)
    with pytest.raises(ValueError, match="'nu' can't be checked: a trial step on params of one"):
        wrapped(odd, moment_dtype={"nu": BF16}).init(PARAMS)
    with pytest.raises(ValueError, match="'mu' can't be checked"):
        wrapped(odd, moment_dtype="int8").init(PARAMS)
    assert wrapped(odd, moment_dtype={"mu": BF16}).init(PARAMS).inner.mu["w"].dtype == jnp.bfloat16


INT8 = {"mu": "int8", "nu": "int8"}
LARGE = {"w": jnp.full((32, 160), 0.5), "b": jnp.ones(160)}


def adam_in(moment_dtype: Any = None, **options: Any) -> Any:
    key = None if moment_dtype is None else KEY
    return wrapped(optax.adam(1e-2), moment_dtype=moment_dtype, key=key, **options)


def gradients(step: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(7), step)
    return jax.tree.map(lambda p: jax.random.normal(key, p.shape), LARGE)


def wide(tx: Any, state: Any) -> Any:
    forms = stored_forms(state.inner, LARGE, tx.moment_dtypes or {})
    return upcast_moments(state.inner, forms)


@functools.cache
def trained(name: str | None) -> Any:
    tx = adam_in(name and {"mu": name, "nu": name}, loss_scale=8.0)
    params, state = LARGE, tx.init(LARGE)
    for step in range(3):
        params, state = stepped(tx, params, state, gradients(step))
        assert state.finite
    return tx, params, state


def test_both_moments_of_a_large_leaf_take_two_bytes_and_their_scales():
    params = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
    state: Any = jax.eval_shape(adam_in(INT8).init, params)
    moments = state.inner[0][1:]
    assert dtypes(moments) == ["int8", "float32", "uint8", "float32"]
    assert [x.shape for x in jax.tree.leaves(moments)] == [(1024, 4096), (1024, 32)] * 2
    program = jax.jit(lambda *of: of).lower(*moments).compile()
    memory: Any = program.memory_analysis()
    assert memory.argument_size_in_bytes / (1024 * 4096) == 2 + 2 * 4 / 128 < 2.1


def test_small_leaves_and_those_of_a_short_last_axis_stay_float32():
    shapes = {"w": (16, 256), "small": (16, 255), "short": (4096, 15), "none": (0, 8), "scalar": ()}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state: Any = jax.eval_shape(adam_in(INT8).init, params)
    found = {name: dtypes(x) for name, x in state.inner[0].nu.items()}
    assert found == {key: ["float32"] for key in shapes} | {"w": ["uint8", "float32"]}
    assert state.inner[0].nu["w"].scale.shape == (16, 2)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("asked", "mu", "nu"),
    [
        ("int8", "int8", "float32"),
        ({"mu": jnp.int8, "nu": "bfloat16"}, "int8", "bfloat16"),
        ({"mu": "bf16", "nu": "int8"}, "bfloat16", "uint8"),
        ({"mu": "int8", "nu": "uint8"}, "int8", "uint8"),
    ],
)
def test_a_bare_dtype_is_the_first_moments_and_fields_may_differ(asked, mu, nu):
    tx = adam_in(asked)
    adam: Any = jax.eval_shape(tx.init, LARGE).inner[0]
    assert (dtypes(adam.mu["w"])[0], dtypes(adam.nu["w"])[0]) == (mu, nu)
    assert adam_in(tx.moment_dtypes).moment_dtypes == tx.moment_dtypes


@pytest.mark.slow
def test_moments_are_those_of_float32_to_the_steps_of_their_codes():
    (tx, params, state), (_, truth, exact) = trained("int8"), trained(None)
    magnitudes = sum(0.1 * np.abs(np.asarray(gradients(step)["w"])) for step in range(3))
    for field in ("mu", "nu"):
        got, right = (getattr(inner[0], field) for inner in (wide(tx, state), exact.inner))
        # each of three steps rounds by less than a step between codes; terms of mu may cancel
        largest = magnitudes if field == "mu" else np.float64(right["w"])
        room = 3 * 2.0**-FRACTION * largest + 1e-9
        np.testing.assert_array_less(np.abs(np.float64(got["w"]) - np.float64(right["w"])), room)
        assert_same(got["b"], right["b"])
    np.testing.assert_allclose(params["w"], truth["w"], atol=0.3 * 3e-2)  # of three steps' way
    assert_same(params["b"], truth["b"])


@pytest.mark.slow
def test_a_step_that_is_not_finite_keeps_codes_and_scales():
    _, params, before = trained("int8")
    tx = adam_in(INT8, loss_scale=8.0)
    bad = {**gradients(3), "w": gradients(3)["w"].at[3, 5].set(jnp.nan)}
    new, after = stepped(tx, params, before, bad)
    assert not after.finite
    assert_same((new, after.inner), (params, before.inner))
    assert stepped(tx, params, before, gradients(3))[1].finite


@pytest.mark.slow
def test_fields_steps_and_leaves_are_rounded_by_bits_of_their_own():
    params = {"a": jnp.zeros((32, 128)), "b": jnp.zeros((32, 128))}
    tx = wrapped(optax.trace(0.0), moment_dtype="int8", key=KEY)
    value = jnp.full((32, 128), 0.55).at[:, 0].set(1.0)  # between two codes
    state: Any = tx.init(params)
    seen = []
    for _ in range(2):
        state = stepped(tx, params, state, {"a": value, "b": value})[1]
        seen += [np.asarray(state.inner.trace[name].qvalue) for name in "ab"]
    assert all(len(np.unique(x[:, 1:])) == 2 for x in seen)
    assert all((seen[i] != seen[j]).any() for i in range(4) for j in range(i))


OTHERS = [None, "bfloat16", {"mu": "bfloat16", "nu": "int8"}, {"nu": "int8"}]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_moment_dtype_is_rejected_by_name_and_converted(other):
    tx, params, state = trained("int8")
    loads = adam_in(other, loss_scale=8.0)
    text = r"other arrays than tx stores for .*0/(mu|nu)/w is \w+\[32, 160\].* instead of \w+"
    with pytest.raises(ValueError, match=text):
        apply_gradients(loads, params, state, gradients(3))
    made = convert(state, params, to=loads)
    assert types(made) == types(loads.init(params))
    assert jax.tree.structure(made) == jax.tree.structure(loads.init(params))
    pairs = zip(*(jax.tree.leaves(wide(*of)) for of in ((loads, made), (tx, state))), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2.0**-4, atol=2.0**-9 * np.abs(b).max())
    _, made, finite = apply_gradients(loads, params, made, gradients(3))
    assert finite
    with pytest.raises(ValueError, match=text):
        apply_gradients(tx, params, made, gradients(3))
    back = convert(made, params, to=tx)
    assert types(back) == types(state)
    assert apply_gradients(tx, params, back, gradients(3))[2]


def test_scales_of_another_shape_are_rejected_by_name():
    tx, params, state = trained("int8")
    cut = lambda x: x[:, :1] if x.shape == (32, 2) else x  # noqa: E731
    half = state._replace(inner=jax.tree.map(cut, state.inner))
    text = r"0/mu/w is int8\[32, 160\] with scales float32\[32, 1\] instead of int8\[32, 160\] with"
    with pytest.raises(ValueError, match=text):
        apply_gradients(tx, params, half, gradients(3))


every_form = pytest.mark.parametrize("form", FORMATS, ids=lambda form: str(form.dtype))
ROUNDING_KEY = jax.random.key(1)
FRACTION = 3  # bits of a code


def numbers(form):
    """The numbers of all codes without a sign, in float64."""
    codes, parts = np.arange(form.largest_code + 1), 2**FRACTION
    exponents, fractions = codes // parts, codes % parts / parts
    small = fractions * 2.0 ** (1 - form.bias)
    return np.where(exponents == 0, small, (1 + fractions) * 2.0 ** (exponents - form.bias))


def draw(form, shape, spread=2.0):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape))).astype(np.float32)
    return x if form.is_signed else x * x


def through(x, form, key=None):
    return np.asarray(decode(encode(jnp.asarray(x), form, key)), np.float64)


@pytest.mark.cases(fast=1)
@every_form
def test_every_code_is_its_sign_exponent_and_fraction_and_comes_back(form):
    signed, truth = np.arange(form.largest_code + 1, dtype=np.uint8), numbers(form)
    if form.is_signed:
        signed, truth = np.concatenate([signed, signed | 128]), np.concatenate([truth, -truth])
    ones = jnp.ones(-(-len(signed) // BLOCK), jnp.float32)
    codes = jax.lax.bitcast_convert_type(jnp.asarray(signed), form.dtype)
    found = decode(Quantized(codes, ones, codec=form))
    np.testing.assert_array_equal(np.asarray(found, np.float64), truth)
    again = np.tile(np.asarray(found)[:, None], BLOCK)
    again[:, -1] = form.largest  # a block of its own for each number, of scale 1
    made = encode(jnp.asarray(again), form)
    back, scales = made.qvalue, made.scale
    np.testing.assert_array_equal(scales, 1.0)
    assert back.dtype == form.dtype
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(back, jnp.uint8)[:, 0], signed)


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("shape", [(3, 1000), (24, 256), (300,), (64,), (2, 3, 8, 128), (5, 16)])
@every_form
def test_numbers_are_rounded_to_nearest_beside_the_largest_of_their_block(form, shape):
    x = draw(form, shape, 1.0)
    made = encode(jnp.asarray(x), form)
    codes, scales = made.qvalue, made.scale
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
    found = np.asarray(decode(made), np.float64)
    off = np.abs(found - np.sign(x) * nearest * of_each)
    # ties go either way, as a quotient is rounded
    tie = np.sort(gaps, -1)[..., 1] - gaps.min(-1) < 1e-5 * nearest
    np.testing.assert_array_less(np.where(tie, 0, off), 1e-6 * np.abs(found) + 1e-30)


@pytest.mark.cases(fast=1)
@every_form
def test_stochastic_rounding_is_right_on_average(form):
    x = draw(form, (16, 128), 0.5)
    keys = jax.random.split(ROUNDING_KEY, 500)
    mean = np.mean(jax.lax.map(lambda key: decode(encode(x, form, key)), keys), axis=0)
    smallest = np.abs(x).max(-1, keepdims=True) * (form.smallest_normal / form.largest)
    is_large = np.abs(x) > smallest
    # a step of at most 2^-fraction_bits of the number; 5 deviations of 500 draws
    room = 5 * 0.5 * 2.0**-FRACTION / np.sqrt(500)
    np.testing.assert_allclose(mean[is_large], x[is_large], rtol=room)
    assert abs(np.mean(mean[is_large] / x[is_large]) - 1) < room / 10


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("key", [None, ROUNDING_KEY])
def test_a_second_moment_above_0_stays_above_0_and_its_root_near_first_moments(key):
    x = np.zeros((4, 128), np.float32)
    x[:, 0] = [1.0, 1e-27, 3e38, 2e-38]  # a CPU takes subnormals for 0
    x[:, 1] = [1.2e-38, 1.2e-38, 1e-30, 1.2e-38]
    found = through(x, POSITIVE, key)
    assert (found[:, :2] > 0).all()
    assert (found[:, 2:] == 0).all()
    np.testing.assert_allclose(found[:3, 0], x[:3, 0], rtol=1e-6)
    smallest = numbers(POSITIVE)[1] / POSITIVE.largest
    assert np.sqrt(smallest) >= numbers(SIGNED)[1] / SIGNED.largest
    np.testing.assert_allclose(found[0, 1], smallest, rtol=1e-6)


@pytest.mark.cases(fast=1)
@every_form
@pytest.mark.parametrize("key", [None, ROUNDING_KEY])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbors_are_not(form, key):
    x = np.ones((3, 256), np.float32)
    for row, bad in enumerate((np.nan, np.inf, -np.nan)):
        x[row, 5] = bad
    found = through(x, form, key)
    assert np.isnan(found[:, :BLOCK]).all()
    np.testing.assert_array_equal(found[:, BLOCK:], 1.0)


@pytest.mark.cases(fast=1)
@every_form
def test_the_largest_and_smallest_float32_stay_finite_and_zeros_stay_zeros(form):
    largest = np.full((2, 128), np.finfo(np.float32).max)
    np.testing.assert_allclose(through(largest, form), largest.astype(np.float64), rtol=1e-6)
    for x in (np.zeros((2, 0)), np.zeros((0, 4)), np.zeros((4, 128))):
        assert (through(x.astype(np.float32), form) == 0).all()


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("shape", [(24, 256), (2, 8, 128)])
def test_tiles_of_a_tpu_give_the_scales_of_blocks(shape):
    x = draw(SIGNED, shape)
    tiles = blockwise._from_tiles(blockwise._in_tiles(x).max(-1, keepdims=True))
    np.testing.assert_array_equal(tiles, blockwise._in_blocks(jnp.asarray(x)).max(-1))
    wide = blockwise._from_tiles(jnp.repeat(blockwise._in_tiles(tiles, 1), BLOCK, -1))
    np.testing.assert_array_equal(wide, np.repeat(tiles, BLOCK, -1))


def mean_of_constants(form, rate, key, elements=256, steps=400):
    """Where a mean of constant numbers ends, relative to them, beside a block's constant 1."""
    goal = np.exp2(-np.linspace(0.5, 3.5, elements)).reshape(-1, 1).astype(np.float32)
    goal = jnp.asarray(np.concatenate([np.ones_like(goal), goal], axis=-1))

    def step(stored, count):
        x = decode(stored) * np.float32(rate) + goal * np.float32(1 - rate)
        x = x.at[:, 0].set(1.0)
        return encode(x, form, None if key is None else jax.random.fold_in(key, count)), x

    start = encode(goal.at[:, 1].set(0.0), form)
    _, seen = jax.lax.scan(step, start, jnp.arange(steps))
    return np.mean(np.asarray(seen)[-steps // 4 :, :, 1] / np.asarray(goal)[:, 1], axis=0)


@pytest.mark.slow
@every_form
def test_means_up_to_the_largest_retention_converge_when_rounded_to_nearest(form):
    assert mean_of_constants(form, LARGEST_DECAY, None).min() > 0.8
    assert mean_of_constants(form, 0.9, None).min() < 0.8


@pytest.mark.slow
@every_form
def test_stochastic_rounding_follows_a_lone_element_at_any_rate(form):
    ends = mean_of_constants(form, 0.99, ROUNDING_KEY, steps=2000)
    np.testing.assert_allclose(ends.mean(), 1, atol=0.02)
    stuck = mean_of_constants(form, 0.99, None, steps=2000)
    assert stuck.mean() < 0.6

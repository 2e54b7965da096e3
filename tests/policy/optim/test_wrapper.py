"""`mixed_precision` through optax's own contract: order, types, skipped steps, rejections."""

import gc
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax, monitoring

import policy
from policy import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    apply_gradients,
    finite_of,
    loss_scale_of,
    master_params,
    mixed_precision,
)
from policy.core.policy import get_policy
from policy.grads import ScaledGradients
from policy.optim import MixedPrecision
from tests.policy.optim.steps import BOTH_WAYS, assert_same, dtypes, stepped, types, wrapped

HALF = [jnp.bfloat16, jnp.float16]
ANY = [jnp.float32, *HALF]
RNG = np.random.default_rng(0)


def params_in(dtype):
    return {
        "b": jnp.asarray(RNG.normal(size=3), dtype),
        "w": {"k": jnp.asarray(RNG.normal(size=(2, 3)), dtype)},
    }


def gradients_like(params, dtype=jnp.float32, value=0.5):
    return jax.tree.map(lambda p: jnp.full(p.shape, value, dtype), params)


def scaled_by(gradients, scale):
    return ScaledGradients(jax.tree.map(lambda g: g * scale, gradients), scale)


def test_its_parts_can_be_read_and_survive_a_rebuilt_tuple():
    tx = mixed_precision(
        optax.sgd(0.1), "mixed_bfloat16", loss_scale=8, clip_global_norm=2, axis_name="i"
    )
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    for made in (tx, tx._replace(), jax.tree.map(lambda f: f, tx)):
        assert isinstance(made, MixedPrecision)
        assert made.policy == get_policy("mixed_bfloat16")
        assert made.loss_scale == StaticLossScale(8)
        assert made.master_weights == "auto"
        assert made.clip_global_norm == 2.0
        assert made.axis_name == ("i",)
        assert isinstance(made.inner, optax.GradientTransformationExtraArgs)
    assert hash(tx) == hash(tx._replace())


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("gradient_dtype", ANY)
@pytest.mark.parametrize("dtype", ANY)
def test_the_inner_transform_sees_float32_everywhere(dtype, gradient_dtype):
    seen = []

    def update(updates, state, params=None):
        seen.extend([*jax.tree.leaves(updates), *jax.tree.leaves(params)])
        return updates, state

    def init(params):
        seen.extend(jax.tree.leaves(params))
        return optax.EmptyState()

    params = params_in(dtype)
    tx = mixed_precision(optax.GradientTransformation(init, update), "float32")
    tx.update(gradients_like(params, gradient_dtype), tx.init(params), params)
    assert len(seen) >= 6
    assert set(dtypes(seen)) == {"float32"}


def test_float64_params_are_stepped_in_float64():
    with jax.enable_x64(True):
        params = jnp.ones(3, jnp.float64)
        tx = wrapped(optax.sgd(2.0**-40))
        new, state = stepped(tx, params, tx.init(params), jnp.ones(3, jnp.float32))
        assert_same(new, jnp.full(3, 1 - 2.0**-40))
        assert state.count.dtype == jnp.int32


@pytest.mark.slow
def test_gradients_are_unscaled_by_the_scale_they_carry_and_by_nothing_else():
    params = params_in(jnp.float32)
    true = gradients_like(params)
    for state_scale in (None, 4.0, DynamicLossScale(2.0**10)):
        tx = wrapped(optax.sgd(1.0), loss_scale=state_scale)
        for given in (true, scaled_by(true, 32.0)):
            updates, _ = tx.update(given, tx.init(params), params)
            assert_same(updates, jax.tree.map(lambda g: -g, true))


@pytest.mark.slow
def test_the_clip_sees_true_gradients():
    params = params_in(jnp.float32)
    gradients = gradients_like(params, value=2.0)
    tx = wrapped(optax.sgd(1.0), clip_global_norm=0.25)
    expected = optax.clip_by_global_norm(0.25).update(gradients, optax.EmptyState())[0]
    for given in (gradients, scaled_by(gradients, 2.0**12)):
        updates, _ = tx.update(given, tx.init(params), params)
        jax.tree.map(lambda u, e: np.testing.assert_allclose(u, -e, rtol=1e-6), updates, expected)
    small = gradients_like(params, value=1e-3)
    assert_same(tx.update(small, tx.init(params), params)[0], jax.tree.map(lambda g: -g, small))


@pytest.mark.slow
def test_a_norm_beyond_float32_skips_the_step_where_it_would_clip_to_nothing():
    params, gradients = [jnp.ones(2), jnp.ones(3)], [jnp.full(2, 1e20), jnp.ones(3)]
    for skip in (True, False):
        tx = wrapped(optax.sgd(1.0), clip_global_norm=1.0, skip_nonfinite=skip)
        new, state = stepped(tx, params, tx.init(params), gradients)
        assert (state.finite, state.skipped) == (not skip, int(skip))
        assert_same(new, params)


def test_the_norm_of_float16_gradients_is_taken_in_float32():
    params = jnp.zeros(4096)
    tx = wrapped(optax.sgd(1.0), clip_global_norm=192.0)
    updates, _ = tx.update(jnp.full(4096, 300, jnp.float16), tx.init(params), params)
    np.testing.assert_allclose(updates, -3.0, rtol=1e-6)  # in float16 the norm, 19200, is inf


def test_a_scaled_gradient_that_overflows_only_when_unscaled_is_seen():
    tx, params = wrapped(optax.sgd(1.0)), jnp.ones(2)
    scaled = ScaledGradients(jnp.full(2, 1e38), 1e-3)
    state = stepped(tx, params, tx.init(params), scaled)[1]
    assert (state.finite, state.skipped) == (False, 1)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("mode", ["full", "none"])
def test_without_skipping_every_step_is_applied_and_none_is_looked_at(dtype, mode):
    params, options = params_in(dtype), {"loss_scale": 8.0, "mode": mode}
    skips = wrapped(optax.adam(1e-2), **options)
    applies = wrapped(optax.adam(1e-2), **options, skip_nonfinite=False)
    good = ScaledGradients(gradients_like(params, dtype, 4.0), 8.0)
    results = []
    for tx in (skips, applies):
        after = stepped(tx, params, tx.init(params), good)
        updates = tx.update(good, tx.init(params), params)[0]
        results.append((after, master_params(*after), updates))
    assert types(results[0]) == types(results[1])
    (_, *expected), (_, *got) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, got)
    bad = gradients_like(params, value=np.nan)
    step = lambda p, g: stepped(applies, p, applies.init(p), g)  # noqa: E731
    new, state = step(params, bad)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(new))
    assert (state.finite, state.count, state.skipped) == (True, 1, 0)
    if mode == "none":
        assert "cond" not in str(jax.make_jaxpr(step)(params, bad))


# float32 may differ by an ulp, which a remainder holds in integers
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [("float32", "none"), ("bfloat16", "remainder"), ("bfloat16", "full")],
)
def test_what_tpus_run_is_the_step(monkeypatch, dtype, mode, through_optax):
    tx = wrapped(optax.adamw(1e-2), "mixed_bfloat16", mode)
    params = {"w": jax.random.normal(jax.random.key(0), (512, 256)).astype(dtype)}
    good = {"w": jnp.full((512, 256), 0.5, jnp.bfloat16)}
    bad = {"w": good["w"].at[7, 7].set(jnp.inf)}
    step = tx.update if through_optax else lambda g, s, p: stepped(tx, p, s, g)

    def run():
        jax.clear_caches()
        return [jax.jit(step)(gradients, tx.init(params), params) for gradients in (good, bad)]

    def numbers(tree):
        leaves = [x for x in jax.tree.leaves(tree) if mode != "remainder" or x.dtype != jnp.uint16]
        return [np.asarray(x, np.float64) for x in leaves]

    expected = run()
    monkeypatch.setattr(lax, "platform_dependent", lambda *operands, tpu, **_: tpu(*operands))
    got = run()
    assert_same(got[1], expected[1])
    for found, truth in zip(numbers(got[0]), numbers(expected[0]), strict=True):
        np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)


def with_overwritten(w: Any, s: Any) -> Any:
    return {"params": {"w": w}, "_overwrite_with_gradient": {"s": jnp.asarray(s, jnp.float32)}}


@pytest.mark.slow
def test_the_overwritten_collection_takes_its_new_value_unless_the_step_is_skipped():
    params = with_overwritten(jnp.ones(3, jnp.bfloat16), [1, 1])
    tx = wrapped(optax.adamw(0.25), "bfloat16", loss_scale=8.0, clip_global_norm=1.0)
    state = tx.init(params)
    # a count, two moments and a master of w only
    assert len(jax.tree.leaves((state.inner, state.masters))) == 4
    value = [np.inf, 5]  # not checked: it is no gradient
    gradients = ScaledGradients(with_overwritten(jnp.full(3, 8.0), value), 8.0)
    train_state: Any = TrainState.create(apply_fn=None, params=params, tx=tx)
    with jax.numpy_dtype_promotion("standard"):
        train_state = train_state.apply_gradients(grads=gradients)
    for moved in (stepped(tx, params, state, gradients)[0], train_state.params):
        np.testing.assert_array_equal(moved["_overwrite_with_gradient"]["s"], value)
        assert (moved["params"]["w"] < 1).all()
    bad = ScaledGradients(with_overwritten(jnp.full(3, jnp.nan), value), 8.0)
    new, after = stepped(tx, params, state, bad)
    assert not after.finite
    assert_same(new, params)
    updates, _ = tx.update(with_overwritten(jnp.ones(3), [2, 5]), state, params)
    np.testing.assert_array_equal(updates["_overwrite_with_gradient"]["s"], [1, 4])


def test_empty_trees_step():
    for params in ({}, {"a": None}, ()):
        tx = wrapped(None, "bfloat16", clip_global_norm=1.0)
        with pytest.warns(UserWarning, match="tx.init was given params without any array"):
            state = tx.init(params)
        new, state = stepped(tx, params, state, params)
        assert new == params
        assert (state.finite, state.count) == (True, 1)


@pytest.mark.slow
def test_optax_finds_the_params_in_the_state():
    params = params_in(jnp.bfloat16)
    tx = wrapped(None, "bfloat16", loss_scale="dynamic")
    state = tx.init(params)
    map_params: Any = optax.tree_utils.tree_map_params
    doubled = map_params(tx, lambda leaf: leaf * 2, state)
    assert_same(doubled.masters, jax.tree.map(lambda m: m * 2, state.masters))
    assert doubled.loss_scale.loss_scale == state.loss_scale.loss_scale
    stepped(tx, params, doubled, gradients_like(params))
    assert optax.tree_utils.tree_get(state, "skipped") == 0


def test_the_state_is_found_wherever_it_lies():
    params = params_in(jnp.float32)
    state = mixed_precision(optax.sgd(0.1), "float32").init(params)
    for holder in (state, (state, optax.EmptyState())):
        assert loss_scale_of(holder) == NoOpLossScale()
    with pytest.raises(ValueError, match="hold one MixedPrecisionState, but got tuple with 2"):
        finite_of((state, state))


def test_complex_params_are_stepped():
    params = jnp.ones(3, jnp.complex64)
    tx = wrapped(optax.sgd(1.0), loss_scale=8.0, clip_global_norm=100.0)
    scaled = ScaledGradients(jnp.full(3, 8j, jnp.complex64), 8.0)
    new, state = stepped(tx, params, tx.init(params), scaled)
    assert state.finite
    np.testing.assert_array_equal(new, np.full(3, 1 - 1j, np.complex64))


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (lambda u, s, p=None: (u, (s, s)), r"state of .* Missing: n\[2\]. Unexpected: 0/n\[2\], "),
        (lambda u, s, p=None: (u, {"n": jnp.ones(3)}), r"state of .* Unexpected: n\[3\]"),
        (lambda u, s, p=None: ((u, u), s), r"updates of .* Unexpected: 0\[2\], 1"),
        (lambda u, s, p=None: (u[:1], s), r"updates of .* Unexpected: \(root\)\[1\]"),
    ],
)
def test_a_transform_that_changes_trees_or_shapes_is_rejected(update, text):
    odd = optax.GradientTransformation(lambda params: {"n": jnp.zeros(2)}, update)  # pyright: ignore[reportArgumentType]
    tx = mixed_precision(odd, "float32")
    with pytest.raises(ValueError, match=r"^tx can't be wrapped: .*" + text):
        apply_gradients(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


NAMES = ("sgd", "adam", "adamw", "lion", "rmsprop", "adagrad", "lamb", "lars", "novograd", "radam")
NAMES += ("yogi", "adabelief")
PARAMS = {"w": jnp.ones((5, 3), jnp.bfloat16), "b": jnp.ones(3)}
WIDE = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
GRADIENTS = jax.tree.map(lambda p: jnp.full(p.shape, 0.1), PARAMS)
COMPILED = []


def _count(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration_secs)


monitoring.register_event_duration_secs_listener(_count)


def programs_of(wrap: Any, params: Any, through_optax: bool) -> int:
    """The number of programs that XLA compiles for two steps of each transform, from no cache."""
    jax.clear_caches()
    before = len(COMPILED)
    for name in NAMES:
        tx = wrap(getattr(optax, name)(1e-2))
        carried = params, tx.init(params)
        for _ in range(2):
            carried = stepped(tx, *carried, GRADIENTS, through_optax)
    return len(COMPILED) - before


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
def test_eager_steps_compile_no_more_programs_than_optax(through_optax):
    ours = programs_of(lambda tx: mixed_precision(tx, "bfloat16"), PARAMS, through_optax)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert ours <= programs_of(lambda tx: tx, WIDE, through_optax=True)


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize("scale", [None, 4.0, jnp.float32(4)])
@pytest.mark.parametrize("mode", ["remainder", "full", "none"])
def test_a_second_eager_step_compiles_nothing(mode, scale):
    adam = optax.inject_hyperparams(optax.adam)(1e-2)
    tx = mixed_precision(adam, "bfloat16", master_weights=mode)
    gradients = GRADIENTS if scale is None else ScaledGradients(GRADIENTS, scale)
    params, state, _ = apply_gradients(tx, PARAMS, tx.init(PARAMS), gradients)
    updates, state = tx.update(gradients, state, params)
    before = len(COMPILED)
    for rate in (0.1, 0.01):
        state = optax.tree_utils.tree_set(state, learning_rate=rate)
        params, state, _ = apply_gradients(tx, params, state, gradients)
        state = optax.tree_utils.tree_set(state, learning_rate=np.float32(rate))
        updates, state = tx.update(gradients, state, params)
    assert len(COMPILED) - before <= 1  # a Python number's conversion
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.slow
def test_programs_of_transforms_that_are_gone_are_let_go():
    def run():
        tx = mixed_precision(optax.adam(1e-2), "bfloat16")
        apply_gradients(tx, PARAMS, tx.init(PARAMS), GRADIENTS)

    def living():
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    run()
    before = living()
    for _ in range(5):
        run()
    assert living() <= before + 1


@pytest.mark.slow
def test_an_inner_transform_that_takes_functions_is_stepped():
    params = {"w": jnp.ones(3)}
    tx = mixed_precision(optax.lbfgs(), "float32")
    value_fn = lambda p: jnp.sum(jnp.square(p["w"]))  # noqa: E731
    value, gradients = jax.value_and_grad(value_fn)(params)
    arguments = {"value": value, "grad": gradients, "value_fn": value_fn}
    new, _, finite = apply_gradients(tx, params, tx.init(params), gradients, **arguments)
    assert finite
    assert value_fn(new) < value


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5)])
def test_an_inner_transform_may_branch_on_numbers_that_it_is_given(value):
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return (updates if extra_args["value"] < 1 else params), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx, params = mixed_precision(inner, "float32"), jnp.ones(3)
    new, _ = stepped(tx, params, tx.init(params), jnp.full(3, 0.5), value=value)
    np.testing.assert_array_equal(new, 1.5)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
@pytest.mark.parametrize("master_weights", ["float32 params", "remainder", "full", "stochastic"])
def test_a_step_on_an_accelerator_is_a_select_where_that_takes_less_memory(
    platform, master_weights
):
    is_wide = master_weights == "float32 params"
    mode: Any = "auto" if is_wide else master_weights
    key = jax.random.key(0) if mode == "stochastic" else None
    tx = mixed_precision(optax.adamw(1e-3), "float32", master_weights=mode, key=key)
    params = {"w": jnp.ones((8, 4), jnp.float32 if is_wide else jnp.bfloat16)}

    def step(params, state, gradients):
        return apply_gradients(tx, params, state, gradients)[:2]

    def conditionals(platform):  # those of platforms among them
        traced = jax.jit(step).trace(params, tx.init(params), params)
        return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.case")

    is_conditional = platform == "tpu" and master_weights in ("full", "stochastic")
    assert conditionals(platform) == conditionals("cpu") - (not is_conditional)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_steps_in_the_layout_of_half_params_whatever_that_of_gradients(platform, dtype):
    tx = mixed_precision(optax.adamw(1e-3), dtype)
    params = {"kernel": jnp.ones((3, 3, 8, 4), dtype), "bias": jnp.ones(4, dtype)}

    def step(params, state, gradients):
        return apply_gradients(tx, params, state, gradients)[:2]

    is_laid_out = platform in ("cuda", "rocm") and dtype == "bfloat16"
    traced = jax.jit(step).trace(params, tx.init(params), params)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@LayoutConstraint") == (is_laid_out and jax.__version_info__ >= (0, 12))


def test_a_step_is_traced_in_few_frames():
    """Names and texts of leaves are made for errors alone, and state is checked by its types."""
    tx, gradients = mixed_precision(optax.adamw(1e-3), "mixed_bfloat16"), GRADIENTS
    state, entered = tx.init(WIDE), []
    folder = f"{Path(policy.__file__).parent}/"

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.append(frame.f_code.co_qualname)

    def step(gradients: Any, state: Any, params: Any) -> Any:
        sys.setprofile(profile)
        try:
            return tx.update(gradients, state, params)
        finally:
            sys.setprofile(None)

    jax.eval_shape(step, gradients, state, WIDE)
    assert len(entered) <= 150
    assert not {"path_name", "leaf_names", "dtype_and_shape"} & set(entered)

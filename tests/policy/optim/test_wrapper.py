"""`mixed_precision` through optax's own contract: order, types, skipped steps, refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from policy import (
    DynamicLossScale,
    MixedPrecision,
    NoOpLossScale,
    ScaledGradients,
    StaticLossScale,
    apply_gradients,
    loss_scale_of,
    master_params,
    mixed_precision,
)
from policy.core.policy import get_policy
from policy.optim import finite_of

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


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), jax.typeof(x).weak_type), tree)


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
    assert {leaf.dtype for leaf in seen} == {jnp.dtype(jnp.float32)}


def test_float64_params_are_stepped_in_float64():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float64)}
        tx = mixed_precision(optax.sgd(2.0**-40), "float32")
        new, state, _ = apply_gradients(
            tx, params, tx.init(params), {"w": jnp.ones(3, jnp.float32)}
        )
        assert new["w"].dtype == jnp.float64
        np.testing.assert_array_equal(new["w"], 1 - 2.0**-40)
        assert state.count.dtype == jnp.int32


def test_gradients_are_unscaled_by_the_scale_they_carry_and_by_nothing_else():
    params = params_in(jnp.float32)
    true = gradients_like(params)
    for state_scale in (None, 4.0, DynamicLossScale(2.0**10)):
        tx = mixed_precision(optax.sgd(1.0), "float32", loss_scale=state_scale)
        state = tx.init(params)
        plain = tx.update(true, state, params)[0]
        scaled = tx.update(
            ScaledGradients(jax.tree.map(lambda g: g * 32, true), 32.0), state, params
        )[0]
        assert_equal(plain, jax.tree.map(lambda g: -g, true))
        assert_equal(scaled, plain)


def test_the_clip_sees_true_gradients():
    params = params_in(jnp.float32)
    gradients = gradients_like(params, value=2.0)
    tx = mixed_precision(optax.sgd(1.0), "float32", clip_global_norm=0.25)
    expected = optax.clip_by_global_norm(0.25).update(gradients, optax.EmptyState())[0]
    for given in (
        gradients,
        ScaledGradients(jax.tree.map(lambda g: g * 2.0**12, gradients), 2.0**12),
    ):
        updates, _ = tx.update(given, tx.init(params), params)
        jax.tree.map(lambda u, e: np.testing.assert_allclose(u, -e, rtol=1e-6), updates, expected)
    small = gradients_like(params, value=1e-3)
    assert_equal(tx.update(small, tx.init(params), params)[0], jax.tree.map(lambda g: -g, small))


def test_a_norm_beyond_float32_skips_the_step_where_it_would_clip_to_nothing():
    params = {"w": jnp.ones(2), "v": jnp.ones(3)}
    gradients = {"w": jnp.full(2, 1e20), "v": jnp.ones(3)}
    for skip, expected in ((True, False), (False, True)):
        tx = mixed_precision(optax.sgd(1.0), "float32", clip_global_norm=1.0, skip_nonfinite=skip)
        new, state, finite = apply_gradients(tx, params, tx.init(params), gradients)
        assert finite == expected
        assert state.skipped == (1 if skip else 0)
        assert_equal(new, params)


def test_the_norm_of_float16_gradients_is_taken_in_float32():
    params = {"w": jnp.zeros(4096)}
    tx = mixed_precision(optax.sgd(1.0), "float32", clip_global_norm=192.0)
    updates, _ = tx.update({"w": jnp.full(4096, 300, jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -3.0, rtol=1e-6)  # in float16 the norm, 19200, is inf


def test_a_scaled_gradient_that_overflows_only_when_unscaled_is_seen():
    params = {"w": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(1.0), "float32")
    _, state, finite = apply_gradients(
        tx, params, tx.init(params), ScaledGradients({"w": jnp.full(2, 1e38)}, 1e-3)
    )
    assert not finite
    assert state.skipped == 1


def test_named_axes_agree_on_the_flag_and_share_the_norm():
    tx = mixed_precision(optax.sgd(1.0), "float32", clip_global_norm=1.0, axis_name="i")
    params = {"w": jnp.zeros((4, 1))}

    def one(params, gradients):
        params, _, finite = apply_gradients(tx, params, tx.init(params), gradients)
        return params, finite

    step = jax.vmap(one, axis_name="i")
    new, finite = step(params, {"w": jnp.ones((4, 1))})
    assert finite.all()
    np.testing.assert_allclose(new["w"], -0.5, rtol=1e-6)  # the norm of all four is 2
    new, finite = step(params, {"w": jnp.ones((4, 1)).at[2].set(jnp.inf)})
    assert not finite.any()
    assert not new["w"].any()


@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("mode", ["full", "kahan", "none"])
def test_without_skipping_every_step_is_applied_and_none_is_looked_at(dtype, mode):
    params, options = params_in(dtype), {"loss_scale": 8.0, "master_weights": mode}
    skips = mixed_precision(optax.adam(1e-2), "float32", **options)
    applies = mixed_precision(optax.adam(1e-2), "float32", **options, skip_nonfinite=False)
    good = ScaledGradients(gradients_like(params, dtype, 4.0), 8.0)
    results = [
        (
            apply_gradients(tx, params, tx.init(params), good),
            tx.update(good, tx.init(params), params)[0],
        )
        for tx in (skips, applies)
    ]
    assert types(results[0]) == types(results[1])
    masters = [master_params(new, state) for (new, state, _), _ in results]
    for expected, got in (masters, [updates for _, updates in results]):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, got)
    bad = gradients_like(params, value=np.nan)
    new, state, finite = apply_gradients(applies, params, applies.init(params), bad)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(new))
    assert (finite, state.count, state.skipped) == (True, 1, 0)
    if mode == "none":
        step = lambda p, g: apply_gradients(applies, p, applies.init(p), g)  # noqa: E731
        assert "cond" not in str(jax.make_jaxpr(step)(params, bad))


def with_overwritten(w: Any, s: Any) -> Any:
    return {"params": {"w": w}, "_overwrite_with_gradient": {"s": jnp.asarray(s, jnp.float32)}}


def test_the_overwritten_collection_takes_its_new_value_unless_the_step_is_skipped():
    params = with_overwritten(jnp.ones(3, jnp.bfloat16), [1, 1])
    tx = mixed_precision(optax.adamw(0.25), "bfloat16", loss_scale=8.0, clip_global_norm=1.0)
    state = tx.init(params)
    # a count, two moments and a master of w only
    assert len(jax.tree.leaves((state.inner, state.masters))) == 4
    value = [np.inf, 5]  # not checked: it is no gradient
    gradients = ScaledGradients(with_overwritten(jnp.full(3, 8.0), value), 8.0)
    new, _, finite = apply_gradients(tx, params, state, gradients)
    assert finite
    train_state: Any = TrainState.create(apply_fn=None, params=params, tx=tx)
    with jax.numpy_dtype_promotion("standard"):
        train_state = train_state.apply_gradients(grads=gradients)
    for moved in (new, train_state.params):
        np.testing.assert_array_equal(moved["_overwrite_with_gradient"]["s"], value)
        assert (moved["params"]["w"] < 1).all()
    bad = ScaledGradients(with_overwritten(jnp.full(3, jnp.nan), value), 8.0)
    new, _, finite = apply_gradients(tx, params, state, bad)
    assert not finite
    assert_equal(new, params)
    updates, _ = tx.update(with_overwritten(jnp.ones(3), [2, 5]), state, params)
    np.testing.assert_array_equal(updates["_overwrite_with_gradient"]["s"], [1, 4])


def test_empty_trees_step():
    for params in ({}, {"a": None}, ()):
        tx = mixed_precision(optax.adam(1e-2), "bfloat16", clip_global_norm=1.0)
        with pytest.warns(UserWarning, match="tx.init was given params without any array"):
            state = tx.init(params)
        new, state, finite = apply_gradients(tx, params, state, params)
        assert new == params
        assert finite
        assert state.count == 1


def test_optax_finds_the_params_in_the_state():
    params = params_in(jnp.bfloat16)
    tx = mixed_precision(optax.adam(1e-2), "bfloat16", loss_scale="dynamic")
    state = tx.init(params)
    map_params: Any = optax.tree_utils.tree_map_params
    doubled = map_params(tx, lambda leaf: leaf * 2, state)
    assert_equal(doubled.masters, jax.tree.map(lambda m: m * 2, state.masters))
    assert doubled.loss_scale.loss_scale == state.loss_scale.loss_scale
    apply_gradients(tx, params, doubled, gradients_like(params))
    assert optax.tree_utils.tree_get(state, "skipped") == 0


def test_the_state_is_found_wherever_it_lies():
    params = params_in(jnp.float32)
    state = mixed_precision(optax.sgd(0.1), "float32").init(params)
    for holder in (state, (state, optax.EmptyState())):
        assert loss_scale_of(holder) == NoOpLossScale()
    with pytest.raises(ValueError, match="hold one MixedPrecisionState, but got tuple with 2"):
        finite_of((state, state))


def test_complex_params_are_stepped():
    params = {"w": jnp.ones(3, jnp.complex64)}
    tx = mixed_precision(optax.sgd(1.0), "float32", loss_scale=8.0, clip_global_norm=100.0)
    scaled = ScaledGradients({"w": jnp.full(3, 8j, jnp.complex64)}, 8.0)
    new, _, finite = apply_gradients(tx, params, tx.init(params), scaled)
    assert finite
    np.testing.assert_array_equal(new["w"], np.full(3, 1 - 1j, np.complex64))


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (lambda u, s, p=None: (u, (s, s)), r"state of .* Missing: n\[2\]. Unexpected: 0/n\[2\], "),
        (lambda u, s, p=None: (u, {"n": jnp.ones(3)}), r"state of .* Unexpected: n\[3\]"),
        (lambda u, s, p=None: ((u, u), s), r"updates of .* Unexpected: 0\[2\], 1"),
        (lambda u, s, p=None: (u[:1], s), r"updates of .* Unexpected: \(root\)\[1\]"),
    ],
)
def test_a_transform_that_changes_trees_or_shapes_is_refused(update, text):
    odd = optax.GradientTransformation(lambda params: {"n": jnp.zeros(2)}, update)  # pyright: ignore[reportArgumentType]
    tx = mixed_precision(odd, "float32")
    with pytest.raises(ValueError, match=r"^tx can't be wrapped: .*" + text):
        apply_gradients(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_an_injected_schedule_keeps_every_float32_value_on_half_precision_params():
    params = params_in(jnp.bfloat16)
    schedule = optax.linear_schedule(1e-3, 0.0, 1000)
    tx = mixed_precision(optax.inject_hyperparams(optax.adam)(schedule), "bfloat16")

    def body(carry, _):
        params, state, _ = apply_gradients(tx, carry[0], carry[1], carry[0])
        # optax's own way to tell the value from the schedule's state, which has the same name
        get = functools.partial(
            optax.tree.get, state, filtering=lambda _, value: isinstance(value, jax.Array)
        )
        return (params, state), (get("learning_rate"), get("b2"))

    _, (rates, b2) = jax.lax.scan(body, (params, tx.init(params)), None, length=1000)
    assert rates.dtype == b2.dtype == jnp.float32
    assert len(np.unique(rates)) == 1000  # optax on bfloat16 params has 12
    np.testing.assert_array_equal(b2, np.float32(0.999))  # there it is 1

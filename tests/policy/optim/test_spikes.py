"""Finite and still wrong: squares that overflow, counters at their end, overwritten scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import (
    DynamicLossScale,
    NoOpLossScale,
    ScaledGradients,
    apply_gradients,
    loss_scale_of,
    mixed_precision,
    value_and_grad,
)

LAST = np.iinfo(np.int32).max
PARAMS = {
    "a": jnp.linspace(-1, 1, 6),
    "b": {"c": jnp.ones((2, 2), jnp.bfloat16), "d": jnp.float32(0.3)},
}
NAMES = ["a", "b/c", "b/d"]


def gradients(leaf=-1, value: Any = 0.0, dtype: Any = jnp.float32):
    """Ones; where `leaf` is one's number, its first element is `value`."""
    leaves, tree = jax.tree.flatten(PARAMS)
    first = lambda p: jnp.arange(p.size).reshape(p.shape) == 0  # noqa: E731
    made = (
        jnp.where((leaf == i) & first(p), value, jnp.ones(p.shape)) for i, p in enumerate(leaves)
    )
    return tree.unflatten(g.astype(dtype) for g in made)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"master_weights": "full"}, {"clip_global_norm": 1.0}, {"loss_scale": "dynamic"}],
)
def test_a_spike_in_any_leaf_is_skipped_and_adam_goes_on(dtype, scale, options):
    tx = mixed_precision(optax.adam(0.1), "mixed_bfloat16", **options)

    @jax.jit
    def step(params, state, leaf, value):
        given = gradients(leaf, value, dtype)
        if scale is not None:
            given = ScaledGradients(
                jax.tree.map(lambda g: g * jnp.asarray(scale, dtype), given), scale
            )
        return apply_gradients(tx, params, state, given)

    params, state = PARAMS, tx.init(PARAMS)
    for leaf in range(len(NAMES)):
        for value in (1e20, -3e37, 2e19):
            new, after, finite = step(params, state, leaf, value)
            assert not finite, (NAMES[leaf], value)
            assert_same((new, after.inner, after.masters), (params, state.inner, state.masters))
        new, state, finite = step(params, state, leaf, 1e18)  # its square is finite
        assert finite
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.inner))
        params, state, finite = step(new, state, -1, 0.0)
        assert finite
        assert (params["a"] != new["a"]).all()


def test_float64_params_take_gradients_whose_squares_float64_holds():
    with jax.enable_x64(True):
        params = {"w": jnp.ones(3, jnp.float64)}
        tx = mixed_precision(optax.adam(0.1), "float32")
        state = tx.init(params)
        assert apply_gradients(tx, params, state, {"w": jnp.full(3, 1e20)})[2]
        assert not apply_gradients(tx, params, state, {"w": jnp.full(3, 1e160)})[2]


def overflowing(count):
    """A transform whose state becomes infinite on step `count`; half of it is from the start."""

    def init(params):
        return {
            "count": jnp.int32(0),
            "limit": jnp.float32(np.inf),
            "mean": jax.tree.map(jnp.zeros_like, params),
        }

    def update(updates, state, params=None):
        factor = jnp.where(state["count"] == count, jnp.float32(np.inf), jnp.float32(1))
        mean = jax.tree.map(lambda m, g: m + g * factor, state["mean"], updates)
        return updates, {"count": state["count"] + 1, "limit": state["limit"], "mean": mean}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("through_optax", [True, False])
@pytest.mark.parametrize("mode", ["full", "remainder", "kahan", "none"])
def test_check_results_skips_a_step_that_makes_a_finite_leaf_infinite(mode, through_optax):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)

    def run(check):
        tx = mixed_precision(overflowing(1), "bfloat16", master_weights=mode, check_results=check)
        assert tx.check_results is check

        @jax.jit
        def step(params, state):
            if not through_optax:
                return apply_gradients(tx, params, state, gradients())[:2]
            updates, state = tx.update(gradients(), state, params)
            with jax.numpy_dtype_promotion("standard"):
                return optax.apply_updates(params, updates), state

        first = step(params, tx.init(params))
        return first, step(*first)

    (_, before), (_, after) = run(check=False)
    assert before.finite and after.finite
    assert np.isinf(after.inner["mean"]["a"]).all()
    (moved, before), (new, after) = run(check=True)
    assert before.finite and not after.finite
    assert_same((new, after.inner, after.masters), (moved, before.inner, before.masters))
    assert (after.count, after.skipped) == (1, 1)


@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("mode", ["remainder", "full", "none"])
def test_counters_stay_at_the_largest_integer_and_training_goes_on(mode, skip_nonfinite):
    tx = mixed_precision(
        optax.sgd(0.5), "bfloat16", master_weights=mode, skip_nonfinite=skip_nonfinite
    )
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = tx.init(params)._replace(count=jnp.int32(LAST - 1), skipped=jnp.int32(LAST - 1))
    step = jax.jit(lambda p, s, g: apply_gradients(tx, p, s, {"w": g})[:2])
    for expected in (0.5, 0.0, -0.5):
        params, state = step(params, state, jnp.ones(3))
        assert (params["w"] == expected).all()
        assert state.count == LAST
        if skip_nonfinite:
            params, state = step(params, state, jnp.full(3, jnp.nan))
            assert state.skipped == LAST


@pytest.mark.parametrize("scale", [0.0, -4.0, np.inf, np.nan])
@pytest.mark.parametrize("grads", ["float32", "compute"])
def test_a_traced_loss_scale_that_is_no_scale_skips_the_step_and_heals(scale, grads):
    tx = mixed_precision(optax.sgd(0.1), "mixed_float16", loss_scale="dynamic")
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    loss_fn = lambda p: jnp.sum(jnp.square(p["w"]))  # noqa: E731

    @jax.jit
    def step(params, state):
        scale = loss_scale_of(state)
        _, found = value_and_grad(loss_fn, policy="mixed_float16", loss_scale=scale, grads=grads)(
            params
        )
        return apply_gradients(tx, params, state, found)

    broken: Any = jax.tree.unflatten(
        jax.tree.structure(DynamicLossScale()), [jnp.float32(scale), jnp.int32(0)]
    )
    new, after, finite = step(params, state._replace(loss_scale=broken))
    assert not finite
    assert_same(new, params)
    healed: Any = loss_scale_of(after)
    assert 1 <= healed.loss_scale < np.inf
    with pytest.raises(ValueError, match="loss_scale should be positive and finite, but got"):
        apply_gradients(tx, params, state._replace(loss_scale=broken), {"w": jnp.ones(3)})


@pytest.mark.parametrize("scale", [0.0, -4.0, np.inf, np.nan])
def test_gradients_that_carry_a_traced_scale_that_is_no_scale_skip_the_step(scale):
    tx = mixed_precision(optax.sgd(0.1), "mixed_float16", loss_scale=NoOpLossScale())
    params = {"w": jnp.ones(3)}
    step = jax.jit(
        lambda g, s: apply_gradients(tx, params, tx.init(params), ScaledGradients({"w": g}, s))
    )
    new, _, finite = step(jnp.ones(3), jnp.float32(scale))
    assert not finite
    assert_same(new, params)
    assert step(jnp.ones(3), jnp.float32(2.0))[2]


def test_check_results_moves_the_bytes_that_the_docs_say():
    params = {"w": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    gradients = {"w": jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)}

    def moved(check):
        tx = mixed_precision(optax.adamw(1e-3), "mixed_bfloat16", check_results=check)
        step = jax.jit(lambda p, s, g: apply_gradients(tx, p, s, g), donate_argnums=(0, 1))
        compiled = step.lower(params, jax.eval_shape(tx.init, params), gradients).compile()
        cost: Any = compiled.cost_analysis()
        return cost["bytes accessed"] / (512 * 256)

    assert abs(moved(False) - 38) < 1
    assert moved(True) < 100

"""A NaN or an infinity anywhere changes the scale alone, in every mode, and training goes on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import DynamicLossScale, apply_gradients, loss_scale_of, mixed_precision

MODES = ["full", "remainder", "kahan", "stochastic", "none"]
PARAMS = {
    "a": jnp.linspace(-1, 1, 6).astype(jnp.bfloat16),
    "b": {"c": jnp.ones((2, 2)), "d": jnp.bfloat16(0.3)},
}
LEAVES = len(jax.tree.leaves(PARAMS))
PERIOD = 3


def wrapped(mode, tx=None, **options):
    inner: Any = tx or optax.adamw(0.1)
    key = jax.random.key(0) if mode == "stochastic" else None
    scale = DynamicLossScale(2.0**10, period=PERIOD)
    return mixed_precision(
        inner, "float32", loss_scale=scale, master_weights=mode, key=key, **options
    )


def gradients(leaf=-1, value: Any = 0.0):
    """Ones; where `leaf` is one's number, its first element is `value`. Both may be traced."""
    leaves, tree = jax.tree.flatten(PARAMS)
    ones = [jnp.ones(p.shape) for p in leaves]
    first = lambda g: jnp.arange(g.size).reshape(g.shape) == 0  # noqa: E731
    return tree.unflatten(jnp.where((leaf == i) & first(g), value, g) for i, g in enumerate(ones))


def bits(tree):
    as_bits = lambda x: x.view(f"u{x.dtype.itemsize}") if x.dtype.kind in "fV" else x  # noqa: E731
    return [as_bits(np.atleast_1d(x)) for x in jax.tree.leaves(tree)]


def unchanged(state):
    return state.inner, state.masters, state.count


def assert_same_bits(a, b):
    for one, other in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("through_optax", [False, True])
def test_a_fault_in_any_leaf_at_any_position_of_the_schedule_moves_the_scale_only(
    mode, through_optax
):
    tx = wrapped(mode)

    @jax.jit
    def step(params, state, leaf, value):
        if not through_optax:
            return apply_gradients(tx, params, state, gradients(leaf, value))[:2]
        updates, state = tx.update(gradients(leaf, value), state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for position in range(2 * PERIOD):  # the last finite step of a period makes the scale grow
        for leaf in range(LEAVES):
            for value in (np.nan, np.inf, -np.inf):
                new, after = step(params, state, leaf, value)
                assert_same_bits((new, unchanged(after)), (params, unchanged(state)))
                assert loss_scale_of(after).loss_scale == loss_scale_of(state).loss_scale / 2
                assert after.skipped == state.skipped + 1
                assert not after.finite
        moved, state = step(params, state, -1, 0.0)
        assert state.finite
        assert state.count == position + 1
        assert not all(np.array_equal(p, m) for p, m in zip(bits(params), bits(moved), strict=True))
        params = moved
    assert loss_scale_of(state).loss_scale == 2.0**12


@pytest.mark.parametrize("mode", MODES)
def test_under_vmap_a_fault_skips_the_step_of_its_own_lane_only(mode):
    tx = wrapped(mode)
    lanes = LEAVES + 1
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (lanes, *p.shape)), PARAMS)
    state = jax.vmap(tx.init)(params)

    @jax.jit
    def step(params, state, faulty):
        one = lambda p, s, leaf: apply_gradients(tx, p, s, gradients(leaf, np.nan))  # noqa: E731
        return jax.vmap(one)(params, state, faulty)

    new, after, finite = step(params, state, jnp.arange(lanes))
    np.testing.assert_array_equal(finite, [False] * LEAVES + [True])
    lane = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
    for i in range(LEAVES):
        assert_same_bits(lane((new, unchanged(after)), i), lane((params, unchanged(state)), i))
    assert (new["a"][-1] < params["a"][-1]).all()
    np.testing.assert_array_equal(loss_scale_of(after).loss_scale, [2.0**9] * LEAVES + [2.0**10])


def test_hyperparameters_are_read_and_changed_in_float32_through_the_wrapper():
    tx = mixed_precision(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), "bfloat16")
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state: Any = tx.init(params)
    rate = optax.tree_utils.tree_get(state, "learning_rate")
    assert rate.dtype == jnp.float32
    assert rate == np.float32(0.1)
    step = jax.jit(lambda p, s: apply_gradients(tx, p, s, {"w": jnp.ones(3)}))
    for new_rate in (1e-3, jnp.float32(1e-3)):
        changed: Any = optax.tree_utils.tree_set(state, learning_rate=new_rate)
        assert_same_bits(changed.masters, state.masters)
        after = step(params, changed)[1]
        rate = optax.tree_utils.tree_get(after, "learning_rate")
        assert rate.dtype == jnp.float32
        assert not jax.typeof(rate).weak_type
        assert rate == np.float32(1e-3)
    eager = apply_gradients(
        tx, params, optax.tree_utils.tree_set(state, learning_rate=1e-3), {"w": jnp.ones(3)}
    )[1]
    assert optax.tree_utils.tree_get(eager, "learning_rate") == np.float32(1e-3)

"""A gradient whose square is not finite changes the scale alone, and training goes on.

Other faults: results that overflow, counters at their end, scales that were overwritten.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policy import DynamicLossScale, apply_gradients, loss_scale_of, mixed_precision, value_and_grad
from policy.grads import ScaledGradients
from tests.policy.optim.steps import BOTH_WAYS, assert_same, bits, stepped, unchanged, wrapped

MODES = ["full", "remainder", "stochastic", "none"]
PARAMS = {
    "a": jnp.linspace(-1, 1, 6).astype(jnp.bfloat16),
    "b": {"c": jnp.ones((2, 2)), "d": jnp.bfloat16(0.3)},
}
LEAVES = len(jax.tree.leaves(PARAMS))
PERIOD = 3
LAST = np.iinfo(np.int32).max


def adamw(mode: Any, **options: Any) -> Any:
    scale = DynamicLossScale(2.0**10, period=PERIOD)
    return wrapped(optax.adamw(0.1), mode=mode, loss_scale=scale, **options)


def gradients(leaf: Any = -1, value: Any = 0.0) -> Any:
    """Ones; where `leaf` is one's number, its first element is `value`. Both may be traced."""
    leaves, tree = jax.tree.flatten(PARAMS)
    first = [jnp.arange(p.size).reshape(p.shape) == 0 for p in leaves]
    one_by_one = zip(range(LEAVES), leaves, first, strict=True)
    return tree.unflatten(
        jnp.where((leaf == i) & is_first, value, jnp.ones(p.shape)) for i, p, is_first in one_by_one
    )


# mode, through optax, other options, the scale that gradients carry
CASES: list[Any] = [
    *((mode, through_optax, {}, None) for mode in MODES for through_optax in BOTH_WAYS),
    ("remainder", False, {"clip_global_norm": 1.0}, None),
    ("full", False, {"clip_global_norm": 1.0}, 8.0),
    ("full", False, {}, 8.0),
]


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize(("mode", "through_optax", "options", "scale"), CASES)
def test_a_fault_in_any_leaf_at_any_position_of_the_schedule_moves_the_scale_only(
    mode, through_optax, options, scale
):
    tx = adamw(mode, **options)

    @jax.jit
    def step(params, state, leaf, value):
        given: Any = gradients(leaf, value)
        if scale is not None:
            scaled = jax.tree.map(lambda g: (g * scale).astype(jnp.bfloat16), given)
            given = ScaledGradients(scaled, scale)
        return stepped(tx, params, state, given, through_optax)

    params, state = PARAMS, tx.init(PARAMS)
    for position in range(2 * PERIOD):  # the last finite step of a period makes the scale grow
        for leaf in range(LEAVES):
            for value in (np.nan, np.inf, -np.inf, 1e20, -3e37):  # the squares of two are infinite
                new, after = step(params, state, leaf, value)
                assert_same(unchanged(new, after), unchanged(params, state))
                assert loss_scale_of(after).loss_scale == loss_scale_of(state).loss_scale / 2
                assert after.skipped == state.skipped + 1
                assert not after.finite
        moved, state = step(params, state, position % LEAVES, 1e18)  # its square is finite
        assert state.finite
        assert state.count == position + 1
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.inner))
        assert not all(np.array_equal(p, m) for p, m in zip(bits(params), bits(moved), strict=True))
        params = moved
    assert loss_scale_of(state).loss_scale == 2.0**12


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("mode", MODES)
def test_under_vmap_a_fault_skips_the_step_of_its_own_lane_only(mode):
    tx, lanes = adamw(mode), LEAVES + 1
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (lanes, *p.shape)), PARAMS)
    state = jax.vmap(tx.init)(params)

    def one(params, state, leaf):
        return apply_gradients(tx, params, state, gradients(leaf, np.nan))

    new, after, finite = jax.jit(jax.vmap(one))(params, state, jnp.arange(lanes))
    np.testing.assert_array_equal(finite, [False] * LEAVES + [True])
    first = [
        jax.tree.map(lambda x: x[:-1], unchanged(*of)) for of in ((new, after), (params, state))
    ]
    assert_same(*first)
    assert (new["a"][-1] < params["a"][-1]).all()
    np.testing.assert_array_equal(loss_scale_of(after).loss_scale, [2.0**9] * LEAVES + [2.0**10])


@pytest.mark.slow
def test_hyperparameters_are_read_and_changed_in_float32_through_the_wrapper():
    tx = mixed_precision(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), "bfloat16")
    params, ones = {"w": jnp.ones(3, jnp.bfloat16)}, {"w": jnp.ones(3)}
    get, put = optax.tree_utils.tree_get, optax.tree_utils.tree_set
    state: Any = tx.init(params)
    rate = get(state, "learning_rate")
    assert (rate.dtype, rate) == (jnp.float32, np.float32(0.1))
    for step in (
        jax.jit(lambda s: apply_gradients(tx, params, s, ones)[1]),
        lambda s: tx.update(ones, s, params)[1],
    ):
        for new_rate in (1e-3, jnp.float32(1e-3)):
            changed: Any = put(state, learning_rate=new_rate)
            assert_same(changed.masters, state.masters)
            rate = get(step(changed), "learning_rate")
            assert (rate.dtype, rate) == (jnp.float32, np.float32(1e-3))
            assert not jax.typeof(rate).weak_type


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
@pytest.mark.parametrize("mode", ["remainder", "full", "none"])
def test_counters_stay_at_the_largest_integer_and_training_goes_on(mode, skip_nonfinite):
    tx = wrapped(optax.sgd(0.5), "bfloat16", mode, skip_nonfinite=skip_nonfinite)
    params = jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)._replace(count=jnp.int32(LAST - 1), skipped=jnp.int32(LAST - 1))
    step = jax.jit(lambda p, s, g: apply_gradients(tx, p, s, g)[:2])
    for expected in (0.5, 0.0, -0.5):
        params, state = step(params, state, jnp.ones(3))
        assert (params == expected).all()
        assert state.count == LAST
        if skip_nonfinite:
            params, state = step(params, state, jnp.full(3, jnp.nan))
            assert state.skipped == LAST


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("scale", [0.0, -4.0, np.inf, np.nan])
@pytest.mark.parametrize("grads", ["float32", "compute"])
def test_a_traced_loss_scale_that_is_no_scale_skips_the_step_and_heals(scale, grads):
    policy = "mixed_float16"
    tx = mixed_precision(optax.sgd(0.1), policy, loss_scale="dynamic")
    params = jnp.ones(3)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        options = {"policy": policy, "loss_scale": loss_scale_of(state), "grads": grads}
        _, found = value_and_grad(lambda p: jnp.sum(jnp.square(p)), **options)(params)
        return apply_gradients(tx, params, state, found)

    structure = jax.tree.structure(DynamicLossScale())
    broken: Any = structure.unflatten([jnp.float32(scale), jnp.int32(0)])
    new, after, finite = step(params, state._replace(loss_scale=broken))
    assert not finite
    assert_same(new, params)
    healed: Any = loss_scale_of(after)
    assert 1 <= healed.loss_scale < np.inf
    with pytest.raises(ValueError, match="loss_scale should be positive and finite, but got"):
        apply_gradients(tx, params, state._replace(loss_scale=broken), params)

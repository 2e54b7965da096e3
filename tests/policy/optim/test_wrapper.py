"""`mixed_precision` through optax's own contract: order, types, skipped steps, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from policy.core.policy import get_policy
from policy.grads.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from policy.grads.value_and_grad import ScaledGradients, value_and_grad
from policy.optim import (
    MixedPrecision,
    MixedPrecisionState,
    apply_gradients,
    finite_of,
    loss_scale_of,
    master_params,
    mixed_precision,
)

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


@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("scale", [None, 8.0, "dynamic"])
def test_the_state_keeps_every_type_in_a_scan(dtype, scale):
    params = params_in(dtype)
    inner = optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 10)
    )
    tx = mixed_precision(inner, "mixed_bfloat16", loss_scale=scale, clip_global_norm=1.0)
    state = tx.init(params)

    def body(carry, value):
        params, state = carry
        params, state, finite = apply_gradients(
            tx, params, state, gradients_like(params, dtype, 1.0)
        )
        return (params, state), finite

    (end_params, end), finite = jax.lax.scan(body, (params, state), jnp.arange(3))
    assert finite.all()
    assert types(end) == types(state)
    assert types(end_params) == types(params)
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(state))
    assert end.count == 3
    assert end.skipped == 0


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
    assert len(seen) == 6
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


def test_complex_params_are_stepped():
    params = {"w": jnp.ones(3, jnp.complex64)}
    tx = mixed_precision(optax.sgd(1.0), "float32", loss_scale=8.0, clip_global_norm=100.0)
    scaled = ScaledGradients({"w": jnp.full(3, 8j, jnp.complex64)}, 8.0)
    new, _, finite = apply_gradients(tx, params, tx.init(params), scaled)
    assert finite
    np.testing.assert_array_equal(new["w"], np.full(3, 1 - 1j, np.complex64))


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


def test_adam_fed_float16_gradients_steps_a_thousandth_not_five_hundred():
    params = {"w": jnp.zeros(3)}
    for gradient in (5e-3, 300.0):
        gradients = {"w": jnp.full(3, gradient, jnp.float16)}
        tx = mixed_precision(optax.adam(1e-3), "mixed_float16", loss_scale=NoOpLossScale())
        updates, _ = tx.update(gradients, tx.init(params), params)
        np.testing.assert_allclose(updates["w"], -1e-3, rtol=1e-3)


def poisoned(params, position, value):
    leaves, treedef = jax.tree.flatten(gradients_like(params))
    leaves[position] = leaves[position].at[(-1,) * leaves[position].ndim].set(value)
    return jax.tree.unflatten(treedef, leaves)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_fault_in_any_leaf_changes_nothing_but_the_scale(dtype, value):
    params = params_in(dtype)
    tx = mixed_precision(
        optax.adamw(1e-2), "mixed_bfloat16", loss_scale=DynamicLossScale(64.0, period=3)
    )
    step = jax.jit(lambda p, s, g: apply_gradients(tx, p, s, g))
    good = gradients_like(params)
    params, state, finite = step(params, tx.init(params), good)
    assert finite and finite_of(state)
    for position in range(len(jax.tree.leaves(params))):
        bad = poisoned(params, position, value)
        new, after, finite = step(params, state, bad)
        assert not finite
        assert not finite_of(after)
        assert_equal(new, params)
        assert_equal(after.inner, state.inner)
        assert_equal(after.masters, state.masters)
        assert (after.count, after.skipped) == (1, 1)
        assert after.loss_scale.loss_scale == 32.0
        assert after.loss_scale.counter == 0
        updates, through_optax = tx.update(bad, state, params)
        assert not any(u.any() for u in jax.tree.leaves(updates))
        assert_equal(through_optax, after)
        recovered, again, finite = step(new, after, good)
        assert finite
        assert (again.count, again.skipped) == (2, 1)
        assert not np.array_equal(recovered["b"], params["b"])


def test_the_scale_moves_on_schedule_at_every_position():
    params = {"w": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(0.1), "float32", loss_scale=DynamicLossScale(16.0, period=3))
    state = tx.init(params)
    flags = [True, True, True, False, True, False, True, True, True]
    scales = []
    for flag in flags:
        gradients = {"w": jnp.full(2, 1.0 if flag else np.nan)}
        params, state, _ = apply_gradients(tx, params, state, gradients)
        scales.append(float(np.asarray(loss_scale_of(state).loss_scale)))
    assert scales == [16, 16, 32, 16, 16, 8, 8, 8, 16]
    assert (state.count, state.skipped) == (7, 2)


def test_a_scaled_gradient_that_overflows_only_when_unscaled_is_seen():
    params = {"w": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(1.0), "float32")
    _, state, finite = apply_gradients(
        tx, params, tx.init(params), ScaledGradients({"w": jnp.full(2, 1e38)}, 1e-3)
    )
    assert not finite
    assert state.skipped == 1


def test_it_works_under_vmap_each_element_by_itself():
    tx = mixed_precision(optax.adam(0.1), "float32", loss_scale=DynamicLossScale(8.0))
    params = {"w": jnp.ones((2, 3))}
    states = jax.vmap(tx.init)(params)
    gradients = {"w": jnp.ones((2, 3)).at[1, 0].set(jnp.nan)}
    new, states, finite = jax.vmap(lambda p, s, g: apply_gradients(tx, p, s, g))(
        params, states, gradients
    )
    np.testing.assert_array_equal(finite, [True, False])
    np.testing.assert_array_equal(states.count, [1, 0])
    np.testing.assert_array_equal(states.loss_scale.loss_scale, [8, 4])
    np.testing.assert_array_equal(new["w"][1], 1.0)
    assert (new["w"][0] < 1).all()


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


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_the_flag_is_agreed_and_the_norm_summed_where_leaves_differ(check_vma):
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("i",))
    everywhere, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("i")
    tx = mixed_precision(
        optax.sgd(1.0), "float32", clip_global_norm=1.0, axis_name=None if check_vma else "i"
    )

    def step(params, gradients):
        params, _, finite = apply_gradients(tx, params, tx.init(params), gradients)
        return params, finite

    in_specs = ({"w": split}, {"w": split})
    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=({"w": split}, everywhere),
            check_vma=check_vma,
        )
    )
    count = 4 * len(devices)
    new, finite = sharded({"w": jnp.zeros(count)}, {"w": jnp.ones(count)})
    assert finite
    np.testing.assert_allclose(new["w"], -(count**-0.5), rtol=1e-6)
    new, finite = sharded({"w": jnp.zeros(count)}, {"w": jnp.ones(count).at[-1].set(jnp.nan)})
    assert not finite
    assert not new["w"].any()


@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("master_weights", ["auto", None])
def test_a_first_step_can_be_donated(dtype, master_weights):
    params = {"w": jnp.asarray(RNG.normal(size=(4, 4)), dtype), "b": jnp.zeros(4, dtype)}
    inner = optax.chain(optax.adam(1e-2), optax.ema(0.9), optax.trace(0.9))
    for transform in (
        inner,
        optax.contrib.schedule_free_adamw(1e-2),
        optax.GradientTransformation(alias, keep),
    ):
        mine = jax.tree.map(jnp.copy, params)
        scale = DynamicLossScale(jnp.float32(8))
        tx = mixed_precision(transform, "float32", loss_scale=scale, master_weights=master_weights)
        state = tx.init(mine)
        step = jax.jit(lambda p, s, g: apply_gradients(tx, p, s, g)[:2], donate_argnums=(0, 1))  # noqa: B023
        gradients = gradients_like(mine)
        for _ in range(2):
            mine, state = step(mine, state, gradients)
        assert scale.loss_scale == 8  # the caller's own arrays were not given away


def no_state(params: Any) -> Any:
    return optax.EmptyState()


def alias(params):
    return {"first": params, "second": params}


def keep(updates, state, params=None):
    return updates, state


def test_counts_and_schedules_inside_stand_still_on_a_skipped_step():
    params = {"w": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(lambda count: 0.5**count), "float32")
    state = tx.init(params)
    steps = []
    for value in (1.0, np.nan, 1.0):
        before = params["w"][0]
        params, state, _ = apply_gradients(tx, params, state, {"w": jnp.full(2, value)})
        steps.append(float(before - params["w"][0]))
    assert steps == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("mode", ["full", "kahan", "none"])
def test_without_skipping_every_step_is_applied_and_none_is_looked_at(dtype, mode):
    params = params_in(dtype)
    skips, applies = (
        mixed_precision(
            optax.adam(1e-2), "float32", loss_scale=8.0, master_weights=mode, skip_nonfinite=skip
        )
        for skip in (True, False)
    )
    assert not applies.skip_nonfinite
    good = ScaledGradients(gradients_like(params, dtype, 4.0), 8.0)
    expected = apply_gradients(skips, params, skips.init(params), good)
    got = apply_gradients(applies, params, applies.init(params), good)
    assert types(expected) == types(got)
    masters = [master_params(new, state) for new, state, _ in (expected, got)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *masters
    )  # XLA fuses them differently
    updates, _ = applies.update(good, applies.init(params), params)
    assert types(updates) == types(skips.update(good, skips.init(params), params)[0])
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        half_ulp = 0.5 * float(
            jnp.finfo(dtype).eps * jnp.abs(param).max()
        )  # a stored param moves by whole ones
        np.testing.assert_allclose(update, -0.01, rtol=0.01, atol=half_ulp)
    bad = gradients_like(params, value=np.nan)
    new, state, finite = apply_gradients(applies, params, applies.init(params), bad)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(new))
    assert finite
    assert state.count == 1
    assert state.skipped == 0
    if mode == "none":
        step = lambda p, g: apply_gradients(applies, p, applies.init(p), g)  # noqa: E731
        assert "cond" not in str(jax.make_jaxpr(step)(params, bad))


def test_multi_steps_inside_leaves_a_bad_microbatch_out():
    params = {"w": jnp.zeros(2)}
    tx = mixed_precision(optax.MultiSteps(optax.sgd(1.0), 2), "float32")  # pyright: ignore[reportArgumentType]
    state = tx.init(params)
    history = []
    for value in (1.0, np.nan, 3.0):
        params, state, _ = apply_gradients(tx, params, state, {"w": jnp.full(2, value)})
        history.append(float(params["w"][0]))
    assert history == [0.0, 0.0, -2.0]


def test_masked_and_partitioned_transforms_go_inside():
    params = params_in(jnp.bfloat16)
    inner = optax.partition(
        {"on": optax.adam(1e-2), "off": optax.set_to_zero()}, {"b": "off", "w": {"k": "on"}}
    )
    masked = optax.masked(optax.sgd(0.1), {"b": False, "w": {"k": True}})
    for transform in (inner, masked):
        tx = mixed_precision(transform, "bfloat16")
        new, _, _ = apply_gradients(tx, params, tx.init(params), gradients_like(params))
        assert not np.array_equal(new["w"]["k"], params["w"]["k"])


def test_extra_arguments_reach_the_inner_transform():
    seen = []

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any, **extra_args: Any
    ) -> Any:
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(no_state, update)  # pyright: ignore[reportArgumentType]
    params = params_in(jnp.float32)
    tx = mixed_precision(inner, "float32")
    apply_gradients(tx, params, tx.init(params), gradients_like(params), value=3)
    tx.update(gradients_like(params), tx.init(params), params, value=4)
    assert seen == [3, 4]


def test_a_train_state_trains_through_optaxs_contract():
    params = {"w": jnp.ones((3, 1))}
    tx = mixed_precision(optax.adam(1e-2), "mixed_float16", loss_scale="dynamic")
    train_state: Any = TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(params):
        return jnp.square(jnp.ones((2, 3)) @ params["w"]).mean()

    @jax.jit
    def step(train_state):
        loss, gradients = value_and_grad(loss_fn, loss_scale=loss_scale_of(train_state.opt_state))(
            train_state.params
        )
        return train_state.apply_gradients(grads=gradients), loss

    losses = []
    for _ in range(21):
        train_state, loss = step(train_state)
        losses.append(loss)
    assert losses[-1] < losses[0]
    assert train_state.opt_state.count == train_state.step == 21
    assert isinstance(loss_scale_of(train_state), DynamicLossScale)


def test_the_overwritten_collection_takes_its_new_value_unless_the_step_is_skipped():
    params = {
        "params": {"w": jnp.ones(3, jnp.bfloat16)},
        "_overwrite_with_gradient": {"s": jnp.ones(2)},
    }
    tx = mixed_precision(optax.adamw(0.25), "bfloat16", loss_scale=8.0, clip_global_norm=1.0)
    state = tx.init(params)
    assert (
        len(jax.tree.leaves((state.inner, state.masters))) == 4
    )  # a count, two moments and a master of w only
    new_value = jnp.array([jnp.inf, 5.0])  # not checked: it is no gradient
    gradients = ScaledGradients(
        {"params": {"w": jnp.full(3, 8.0)}, "_overwrite_with_gradient": {"s": new_value}}, 8.0
    )
    new, _, finite = apply_gradients(tx, params, state, gradients)
    assert finite
    np.testing.assert_array_equal(new["_overwrite_with_gradient"]["s"], new_value)
    assert (new["params"]["w"] < 1).all()
    gradients.tree["params"]["w"] = jnp.full(3, jnp.nan)
    new, _, finite = apply_gradients(tx, params, state, gradients)
    assert not finite
    assert_equal(new, params)
    train_state: Any = TrainState.create(apply_fn=None, params=params, tx=tx)
    gradients = ScaledGradients(
        {"params": {"w": jnp.full(3, 8.0)}, "_overwrite_with_gradient": {"s": new_value}}, 8.0
    )
    with jax.numpy_dtype_promotion("standard"):
        train_state = train_state.apply_gradients(grads=gradients)
    np.testing.assert_array_equal(train_state.params["_overwrite_with_gradient"]["s"], new_value)
    assert (train_state.params["params"]["w"] < 1).all()
    finite_value = {
        "params": {"w": jnp.ones(3)},
        "_overwrite_with_gradient": {"s": jnp.array([2.0, 5.0])},
    }
    updates, _ = tx.update(finite_value, state, params)
    np.testing.assert_array_equal(updates["_overwrite_with_gradient"]["s"], [1.0, 4.0])


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
    tx = mixed_precision(optax.sgd(0.1), "float32")
    assert loss_scale_of(tx.init(params)) == NoOpLossScale()
    assert loss_scale_of((tx.init(params), optax.EmptyState())) == NoOpLossScale()
    with pytest.raises(
        ValueError,
        match="opt_state should hold one MixedPrecisionState, but got dict with 0: make it",
    ):
        loss_scale_of({"a": 1})
    with pytest.raises(
        ValueError, match="opt_state should hold one MixedPrecisionState, but got tuple with 2"
    ):
        finite_of((tx.init(params), tx.init(params)))


def test_bad_arguments_are_refused_by_name():
    sgd = optax.sgd(0.1)
    with pytest.raises(TypeError, match="tx should be an optax transform, but got float"):
        mixed_precision(0.1, "float32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="tx is a mixed_precision already: wrap it only once"):
        mixed_precision(mixed_precision(sgd, "float32"), "float32")
    with pytest.raises(
        ValueError, match="tx already contains a mixed_precision: wrap once, outermost"
    ):
        mixed_precision(optax.chain(mixed_precision(sgd, "float32")), "float32").init(jnp.ones(2))
    with pytest.raises(
        ValueError, match="master_weights='stochastic' needs a key: mixed_precision"
    ):
        mixed_precision(sgd, "float32", master_weights="stochastic")
    with pytest.raises(
        ValueError,
        match="key is for stochastic rounding, but master_weights is 'auto' and moment_dtype is",
    ):
        mixed_precision(sgd, "float32", key=jax.random.key(0))
    for key, shown in (
        (0, "int"),
        (jax.random.split(jax.random.key(0)), r"key<fry>\[2\]"),
        (jnp.ones(2), "float32"),
    ):
        with pytest.raises(
            TypeError, match=f"key should be one JAX PRNG key, such as .*, but got {shown}"
        ):
            mixed_precision(sgd, "float32", master_weights="stochastic", key=key)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError,
        match=r"A dynamic loss scale is .* skip_nonfinite=False does not check",
    ):
        mixed_precision(sgd, "float32", loss_scale="dynamic", skip_nonfinite=False)
    with pytest.raises(
        ValueError,
        match=r"master_weights should be one of 'auto', .* 'none' or None, but got 'half'",
    ):
        mixed_precision(sgd, "float32", master_weights="half")  # pyright: ignore[reportArgumentType]
    for norm in (0, -1.0, float("inf"), "a"):
        with pytest.raises(
            ValueError, match="clip_global_norm should be a positive finite number, but got"
        ):
            mixed_precision(sgd, "float32", clip_global_norm=norm)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="loss_scale should be positive and finite, but got 0"):
        mixed_precision(sgd, "float32", loss_scale=0)


def test_params_that_cannot_be_stepped_are_refused_by_path():
    tx = mixed_precision(optax.sgd(0.1), "float32")
    params = {
        "w": jnp.ones(2),
        "n": jnp.int32(1),
        "t": {"f8": jnp.ones(2, jnp.float8_e4m3fn), "p": 1.0},
    }
    with pytest.raises(ValueError) as error:
        tx.init(params)
    text = (
        "params should be floating arrays of 16 bits or more, but n is int32, "
        "t/f8 is float8_e4m3fn, t/p is float."
    )
    assert text in str(error.value)
    assert "Keep such leaves out of the tree that is differentiated and updated." in str(
        error.value
    )


def test_calls_whose_arguments_do_not_belong_together_are_refused():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = mixed_precision(optax.sgd(0.1), "float32")
    state = tx.init(params)
    with pytest.raises(
        ValueError,
        match=r"params are needed, because the step is computed on float32 weights\. Call update",
    ):
        tx.update(params, state)
    with pytest.raises(
        TypeError, match="state should be a MixedPrecisionState, but got EmptyState"
    ):
        tx.update(params, optax.EmptyState(), params)
    with pytest.raises(
        ValueError,
        match=r"gradients should have the tree of the params\. Missing: b\. Unexpected: c/d\.",
    ):
        tx.update({"a": jnp.ones(2), "c": {"d": jnp.ones(3)}}, state, params)
    with pytest.raises(
        ValueError,
        match=r"but a is float32\[3\] for a param of float32\[2\], b is int32\[3\] for a param of",
    ):
        tx.update({"a": jnp.ones(3), "b": jnp.ones(3, int)}, state, params)
    with pytest.raises(
        ValueError,
        match=r"complex for complex params only.* but a is complex64\[2\] for a param of",
    ):
        tx.update({"a": jnp.ones(2, complex), "b": jnp.ones(3)}, state, params)
    with pytest.raises(TypeError, match="gradients contain a ScaledGradients inside their tree"):
        tx.update({"a": ScaledGradients(jnp.ones(2), 8.0), "b": jnp.ones(3)}, state, params)
    with pytest.raises(
        ValueError,
        match=r"that the optimizer state was made for\. Missing: b\. Unexpected: c/d\. Containers",
    ):
        params = {"a": jnp.ones(2), "c": {"d": jnp.ones(3)}}
        tx.update(params, state, params)


def odd_transform(update) -> Any:
    return optax.GradientTransformation(lambda params: {"n": jnp.zeros(2)}, update)


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (lambda u, s, p=None: (u, (s, s)), "its update changed the tree of its state, from"),
        (
            lambda u, s, p=None: (u, {"n": jnp.ones(3)}),
            r"shapes in its state: n is float32\[3\] instead of float32\[2\]",
        ),
        (lambda u, s, p=None: ((u, u), s), "its updates should have the tree of the params"),
        (
            lambda u, s, p=None: (u[:1], s),
            r"the params' shapes, but \(root\) is float32\[1\] instead of float32\[2\]",
        ),
    ],
)
def test_a_transform_that_cannot_be_wrapped_is_refused_by_name(update, text):
    tx = mixed_precision(odd_transform(update), "float32")
    with pytest.raises(ValueError, match=r"^tx \(odd_transform\) can't be wrapped: .*" + text):
        apply_gradients(tx, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_apply_gradients_takes_the_wrapper_only_and_names_the_order():
    params = {"w": jnp.ones(2)}
    tx = mixed_precision(optax.sgd(0.1), "float32")
    # optax's own are refused by init
    outer: Any = optax.GradientTransformation(lambda params: (tx.init(params),), tx.update)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match=r"with a mixed_precision inside\. Put it outermost: mixed_precision\(optax"
    ):
        apply_gradients(outer, params, outer.init(params), params)
    plain = optax.sgd(0.1)
    with pytest.raises(
        TypeError,
        match=r"should be a mixed_precision transform, but got GradientTransformation\w*: wrap it",
    ):
        apply_gradients(plain, params, plain.init(params), params)
    with pytest.raises(TypeError, match="state should be a MixedPrecisionState"):
        apply_gradients(tx, params, plain.init(params), params)


@pytest.mark.parametrize(
    "make",
    [
        optax.sgd,
        optax.adam,
        optax.adamw,
        optax.lion,
        optax.adafactor,
        lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
        lambda rate: optax.MultiSteps(optax.adam(rate), 2),
        lambda rate: optax.apply_if_finite(optax.sgd(rate), 3),
        lambda rate: optax.identity(),
    ],
)
def test_a_plain_optimizer_refuses_scaled_gradients_by_their_name(make):
    params, plain = {"w": jnp.ones(2)}, make(0.1)
    scaled = ScaledGradients({"w": jnp.ones(2)}, 8.0)
    with (
        pytest.raises((TypeError, ValueError), match="ScaledGradients"),
        jax.numpy_dtype_promotion("standard"),
    ):
        updates, _ = plain.update(scaled, plain.init(params), params)
        optax.apply_updates(params, updates)


def test_the_state_is_a_named_tuple_with_the_promised_parts():
    assert {"inner", "loss_scale", "finite", "skipped", "count"} < set(MixedPrecisionState._fields)

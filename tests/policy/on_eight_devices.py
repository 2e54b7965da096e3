"""The step across devices, on eight of them. `test_eight_devices.py` runs this file in a process that has eight."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from policy import (
    DynamicLossScale,
    accumulate_gradients,
    all_reduce,
    apply_gradients,
    collectives_of,
    loss_scale_of,
    master_params,
    mixed_precision,
    split_batch,
    state_shardings,
    value_and_grad,
    vary,
)

DEVICES = 8
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("data")
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
BATCH = (
    jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32),
    jnp.asarray(RNG.normal(size=(32, 1)), jnp.float32),
)
F32 = {
    "hidden": jnp.asarray(RNG.normal(size=(4, 16)) / 2, jnp.float32),
    "head": jnp.asarray(RNG.normal(size=(16, 1)) / 4, jnp.float32),
}


def loss_fn(params, batch, dtype=jnp.bfloat16):
    x, y = batch
    hidden = jnp.tanh(x.astype(dtype) @ params["hidden"].astype(dtype))
    return jnp.mean(jnp.square((hidden @ params["head"].astype(dtype)).astype(jnp.float32) - y))


def f32_loss(params, batch):
    return loss_fn(params, batch, jnp.float32)


def placed(tree, spec):
    return jax.device_put(tree, jax.tree.map(lambda _: NamedSharding(MESH, spec), tree))


def replicated_step(tx, loss, dtype, policy="mixed_bfloat16", check_vma=True, microbatches=1):
    """Data parallel under shard_map: each device's own gradients, one all-reduce, the same step on each."""

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(EVERYWHERE, EVERYWHERE, SPLIT),
        out_specs=(EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE),
        check_vma=check_vma,
    )
    def step(params, state, batch):
        fn = value_and_grad(loss, policy=policy, loss_scale=loss_scale_of(state), grads="compute")
        value, grads = accumulate_gradients(fn, vary(params, "data"), split_batch(batch, microbatches))
        params, state, finite = apply_gradients(tx, params, state, all_reduce(grads, "data", dtype))
        return params, state, finite, lax.pmean(value, "data")

    return step


def plain_step(tx, loss, policy="mixed_bfloat16"):
    """One device, or jit over sharded arrays."""

    @jax.jit
    def step(params, state, batch):
        value, grads = value_and_grad(loss, policy=policy, loss_scale=loss_scale_of(state), grads="compute")(
            params, batch
        )
        return *apply_gradients(tx, params, state, grads), value

    return step


def curve(step, params, state, batch, steps=5):
    losses = []
    for _ in range(steps):
        params, state, finite, loss = step(params, state, batch)
        assert finite
        losses.append(float(loss))
    return losses, params


def test_there_are_eight_devices():
    assert jax.device_count() == DEVICES


def test_eight_devices_and_one_agree_to_float32_rounding():
    tx = mixed_precision(optax.adam(1e-2), "float32", loss_scale="dynamic", clip_global_norm=0.5)
    state = tx.init(F32)
    truth, end = curve(plain_step(tx, f32_loss, "float32"), F32, state, BATCH)
    assert truth[-1] < truth[0]
    others = [
        curve(replicated_step(tx, f32_loss, "float32", "float32"), F32, state, BATCH),
        curve(replicated_step(tx, f32_loss, "float32", "float32", check_vma=False), F32, state, BATCH),
        curve(replicated_step(tx, f32_loss, "float32", "float32", microbatches=2), F32, state, BATCH),
        curve(
            plain_step(tx, f32_loss, "float32"),
            placed(F32, EVERYWHERE),
            placed(state, EVERYWHERE),
            placed(BATCH, SPLIT),
        ),
    ]
    for losses, params in others:
        np.testing.assert_allclose(losses, truth, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, end)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_gradients_cross_once_a_step_in_the_dtype_that_is_asked(dtype, check_vma):
    tx = mixed_precision(optax.adam(1e-2), "mixed_bfloat16", loss_scale="dynamic", clip_global_norm=0.5)
    step = replicated_step(tx, loss_fn, dtype, check_vma=check_vma, microbatches=2)
    args = F32, tx.init(F32), BATCH
    for stage in ("traced", "partitioned"):
        found = [(c.dtype, c.shape) for c in collectives_of(step, *args, stage=stage) if c.size > 1]
        assert sorted(found) == [(dtype, (4, 16)), (dtype, (16, 1))]
        assert all(c.axes == ("data",) for c in collectives_of(step, *args, stage=stage))
    losses, _ = curve(step, *args)
    np.testing.assert_allclose(losses, curve(plain_step(tx, loss_fn), *args)[0], rtol=0.01)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_under_jit_gradients_cross_in_the_dtype_of_the_weight_gradients_dot(dtype):
    tx = mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    state = placed(tx.init(F32), EVERYWHERE)
    args = placed(F32, EVERYWHERE), state, placed(BATCH, SPLIT)
    step = plain_step(tx, functools.partial(loss_fn, dtype=dtype))
    found = collectives_of(step, *args)
    assert {c.dtype for c in found if c.size > 1} == {jnp.dtype(dtype).name}
    assert {(c.operation, c.axes) for c in found} == {("all-reduce", ("data",))}
    assert sorted(c.size for c in found if c.size > 1) == [16, 64]


def test_a_fault_in_one_shard_of_eight_skips_the_step_on_all():
    inner = optax.MultiSteps(optax.adam(1e-2), 2)
    tx = mixed_precision(inner, "mixed_bfloat16", loss_scale=DynamicLossScale(8.0), clip_global_norm=0.5)
    state = tx.init(F32)
    x, y = BATCH
    sharded = {"hidden": PartitionSpec(None, "data"), "head": SPLIT}
    specs = jax.tree.map(lambda s: s.spec, state_shardings(tx, fully_sharded(jnp.float32)[0]))
    steps = [
        replicated_step(tx, loss_fn, "bfloat16"),
        replicated_step(tx, loss_fn, "bfloat16", check_vma=False),
        sharded_step(tx, loss_fn, sharded, specs),
        plain_step(tx, loss_fn),
    ]
    for step, value in itertools.product(steps, (np.nan, np.inf)):
        batch = placed((x.at[13, 2].set(value), y), SPLIT)
        params, after, finite, _ = step(placed(F32, EVERYWHERE), placed(state, EVERYWHERE), batch)
        assert not finite
        assert after.skipped == 1
        assert after.loss_scale.loss_scale == 4
        jax.tree.map(np.testing.assert_array_equal, (params, after.inner), (F32, state.inner))
        params, after, finite, _ = step(params, after, placed(BATCH, SPLIT))
        assert finite
        assert after.inner.mini_step == 1


def fully_sharded(dtype):
    """Params split over the devices, and where each lies."""
    shardings = {"hidden": NamedSharding(MESH, PartitionSpec(None, "data")), "head": NamedSharding(MESH, SPLIT)}
    return jax.device_put(jax.tree.map(lambda p: p.astype(dtype), F32), shardings), shardings


def sharded_step(tx, loss, param_specs, state_specs, check_vma=True):
    """Each device keeps a part of each param, gathers the whole inside the loss, and gets its part's gradient back."""

    def gathered(params, batch):
        axes = {"hidden": 1, "head": 0}
        whole = jax.tree.map(lambda p, axis: lax.all_gather(p, "data", axis=axis, tiled=True), params, axes)
        return loss(whole, batch) / DEVICES

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(param_specs, state_specs, SPLIT),
        out_specs=(param_specs, state_specs, EVERYWHERE, EVERYWHERE),
        check_vma=check_vma,
    )
    def step(params, state, batch):
        value, grads = value_and_grad(gathered, loss_scale=loss_scale_of(state), grads="compute")(params, batch)
        params, state, finite = apply_gradients(tx, params, state, grads)
        return params, state, finite, lax.psum(value, "data")

    return step


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_norm_of_sharded_gradients_is_the_single_devices(check_vma):
    make = functools.partial(mixed_precision, optax.sgd(0.1), "float32", clip_global_norm=1e-2, loss_scale=4.0)
    one, tx = make(), make(axis_name=None if check_vma else "data")
    params, shardings = fully_sharded(jnp.float32)
    specs = jax.tree.map(lambda s: s.spec, (shardings, state_shardings(tx, params)))
    state = tx.init(F32)
    found = curve(sharded_step(tx, f32_loss, *specs, check_vma=check_vma), params, state, BATCH, 2)[1]
    truth = curve(plain_step(one, f32_loss, "float32"), F32, state, BATCH, 2)[1]
    moved = jax.tree.map(lambda a, b: a - b, truth, F32)
    np.testing.assert_allclose(optax.tree.norm(moved), 2 * 0.1 * 1e-2, rtol=0.05)  # it does clip
    jax.tree.map(lambda a, b, p: np.testing.assert_allclose(a - p, b - p, rtol=1e-3, atol=1e-7), found, truth, F32)


def test_the_norm_counts_a_replicated_leaf_once_and_a_sharded_one_all_over():
    tx = mixed_precision(optax.sgd(1.0), "float32", clip_global_norm=1.0)
    params = {"part": jnp.zeros(16), "whole": jnp.zeros(4)}
    grads = {"part": jnp.arange(16.0), "whole": jnp.full(4, 7.0)}
    specs = {"part": SPLIT, "whole": EVERYWHERE}

    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(specs, specs), out_specs=specs)
    def step(params, grads):
        return apply_gradients(tx, params, tx.init(params), grads)[0]

    norm = np.sqrt(np.sum(np.arange(16.0) ** 2) + 4 * 49)
    new = jax.jit(step)(params, grads)
    jax.tree.map(lambda p, g: np.testing.assert_allclose(p, -g / norm, rtol=1e-6), new, grads)


@pytest.mark.parametrize("mode", ["full", "remainder", "kahan", "stochastic"])
def test_each_storage_mode_lies_as_its_params_and_the_first_step_is_donated(mode):
    params, shardings = fully_sharded(jnp.bfloat16)
    key = jax.random.key(0) if mode == "stochastic" else None
    tx = mixed_precision(optax.adam(1e-2), "bfloat16", loss_scale="dynamic", master_weights=mode, key=key)
    places = state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=places)(params)
    assert jax.tree.map(lambda x: x.sharding, state) == places
    for kept in (state.inner[0].mu, *([] if mode == "stochastic" else [state.masters])):
        assert kept["hidden"].sharding == shardings["hidden"]
        assert kept["hidden"].addressable_shards[0].data.shape == (4, 2)

    def one(params, state, batch):
        fn = value_and_grad(loss_fn, policy="bfloat16", loss_scale=loss_scale_of(state), grads="compute")
        return apply_gradients(tx, params, state, fn(params, batch)[1])

    # a donated buffer that could not be used warns, and warnings are errors here
    step = jax.jit(one, donate_argnums=(0, 1), out_shardings=(shardings, places, None))
    before = jax.tree.leaves((params, state.masters, state.inner))
    whole = jax.tree.map(lambda p: p.astype(jnp.bfloat16), F32)
    truth = jax.jit(one)(whole, tx.init(whole), BATCH)
    params, state, finite = step(params, state, placed(BATCH, SPLIT))
    assert finite
    assert all(leaf.is_deleted() for leaf in before)
    assert jax.tree.map(lambda x: x.sharding, state) == places
    mine, theirs = master_params(params, state), master_params(truth[0], truth[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), mine, theirs)

"""Faults, norms, shardings and donation on eight devices, run by `test_shardings.py`."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policy import (
    DynamicLossScale,
    accumulate_gradients,
    apply_gradients,
    loss_scale_of,
    master_params,
    split_batch,
    state_shardings,
    value_and_grad,
)
from tests.policy.grads.across_devices import (
    BATCH,
    DEVICES,
    EVERYWHERE,
    F32,
    MESH,
    SPLIT,
    curve,
    f32_loss,
    fully_sharded,
    loss_fn,
    placed,
    plain_step,
    replicated_step,
    sharded_step,
)
from tests.policy.optim.steps import assert_same, stepped, unchanged, wrapped


def assert_only_the_scale_moved(before, after):
    assert_same(unchanged(*after), unchanged(*before))
    state = after[1]
    assert not np.any(state.finite)
    np.testing.assert_array_equal(state.skipped, before[1].skipped + 1)
    np.testing.assert_array_equal(state.loss_scale.loss_scale, before[1].loss_scale.loss_scale / 2)


def accumulating(dtype, mode: Any = "auto", axis_name=None):
    """Returns Adam on two steps' mean gradients, params of `dtype`, and the shardings of both."""
    scale, adam = DynamicLossScale(2.0**8), optax.MultiSteps(optax.adam(1e-2), 2)
    options = {"loss_scale": scale, "clip_global_norm": 0.5, "axis_name": axis_name}
    tx = wrapped(adam, "mixed_bfloat16", mode, **options)
    params, shardings = fully_sharded(dtype)
    return tx, params, (shardings, state_shardings(tx, params))


def mapped(step, specs, check_vma=True):
    options = {"mesh": MESH, "in_specs": (*specs, specs[0]), "out_specs": specs}
    return jax.jit(jax.shard_map(step, **options, check_vma=check_vma))


def specs_of(shardings):
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


KINDS = ["replicated", "replicated, untyped", "sharded", "sharded, untyped", "jit"]


@pytest.mark.parametrize(
    ("kind", "dtype", "mode"),
    [*((kind, jnp.float32, "auto") for kind in KINDS), ("replicated", jnp.bfloat16, "remainder")],
)
def test_a_fault_in_the_batch_of_any_device_of_eight_skips_the_step_on_all(kind, dtype, mode):
    named = "data" if kind == "sharded, untyped" else None
    tx, params, places = accumulating(dtype, mode, named)
    if kind == "jit":
        step = plain_step(tx, loss_fn)
    elif kind.startswith("sharded"):
        step = sharded_step(tx, loss_fn, *specs_of(places), check_vma=named is None)
    else:
        params = jax.tree.map(lambda p: p.astype(dtype), F32)
        step = replicated_step(tx, loss_fn, "bfloat16", check_vma=kind == "replicated")
    before = params, tx.init(params)
    x, y = BATCH
    for mini_step in range(2):
        for device, value in itertools.product(range(DEVICES), (np.nan, np.inf)):
            batch = placed((x.at[device * len(x) // DEVICES + 1, 2].set(value), y), SPLIT)
            assert_only_the_scale_moved(before, step(*before, batch)[:2])
        before = step(*before, placed(BATCH, SPLIT))[:2]
        assert before[1].finite
        assert before[1].inner.mini_step == 1 - mini_step
    assert not np.array_equal(before[0]["hidden"], F32["hidden"].astype(dtype))


@pytest.mark.parametrize("mode", ["full", "remainder", "stochastic", "remainder, untyped"])
def test_a_fault_in_one_devices_part_of_a_gradient_is_agreed_by_all(mode):
    mode, _, untyped = mode.partition(", ")
    tx, params, places = accumulating(jnp.bfloat16, mode, "data" if untyped else None)
    step = mapped(lambda p, s, g: stepped(tx, p, s, g), specs_of(places), not untyped)
    before = params, jax.device_put(tx.init(params), places[1])
    grads = jax.tree.map(jnp.ones_like, params)
    for mini_step in range(2):
        for device, value in itertools.product(range(DEVICES), (np.nan, np.inf)):
            faulty = grads | {"hidden": grads["hidden"].at[3, 2 * device].set(value)}
            assert_only_the_scale_moved(before, step(*before, faulty))
        before = step(*before, grads)
        assert before[1].inner.mini_step == 1 - mini_step
    assert (before[0]["hidden"] < params["hidden"]).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_norm_of_sharded_gradients_is_the_single_devices(check_vma):
    make = functools.partial(wrapped, optax.sgd(0.1), clip_global_norm=1e-2, loss_scale=4.0)
    one, tx = make(), make(axis_name=None if check_vma else "data")
    params, shardings = fully_sharded(jnp.float32)
    specs, state = specs_of((shardings, state_shardings(tx, params))), tx.init(F32)
    step = sharded_step(tx, f32_loss, *specs, check_vma=check_vma)
    found = curve(step, params, state, BATCH, 2)[1]
    truth = curve(plain_step(one, f32_loss, "float32"), F32, state, BATCH, 2)[1]
    moved = jax.tree.map(lambda a, b: a - b, truth, F32)
    np.testing.assert_allclose(optax.tree.norm(moved), 2 * 0.1 * 1e-2, rtol=0.05)  # it does clip
    for name, start in F32.items():
        expected = truth[name] - start
        np.testing.assert_allclose(found[name] - start, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("mode", ["full", "remainder", "stochastic"])
def test_each_storage_mode_lies_as_its_params_and_the_first_step_is_donated(mode):
    params, shardings = fully_sharded(jnp.bfloat16)
    tx = wrapped(optax.adam(1e-2), "bfloat16", mode, loss_scale="dynamic")
    places = state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=places)(params)
    assert jax.tree.map(lambda x: x.sharding, state) == places
    for kept in (state.inner[0].mu, *([] if mode == "stochastic" else [state.masters])):
        assert kept["hidden"].sharding == shardings["hidden"]
        assert kept["hidden"].addressable_shards[0].data.shape == (4, 2)

    def one(params, state, batch):
        scale = loss_scale_of(state)
        fn = value_and_grad(loss_fn, policy="bfloat16", loss_scale=scale, grads="compute")
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


def with_codes(shape, place, axis_name=None):
    """Returns Adam with moments in 8 bits, a param of that shape and place, and its state."""
    both = {"mu": "int8", "nu": "int8"}
    options = {"moment_dtype": both, "key": jax.random.key(0), "axis_name": axis_name}
    tx = wrapped(optax.adam(1e-2), **options)
    param = jax.random.normal(jax.random.key(1), shape)
    params = {"w": jax.device_put(param, jax.NamedSharding(MESH, place))}
    places = state_shardings(tx, params)
    return tx, params, jax.jit(tx.init, out_shardings=places)(params), places


def two_steps(step, params, state):
    for _ in range(2):
        params, state = step(params, state, jax.tree.map(lambda p: jnp.cos(9 * p), params))
    return params, state


LAYOUTS = [((64, 256), P("data")), ((16, 1024), P(None, "data")), ((64, 512), P(None, "data"))]


@pytest.mark.parametrize(("shape", "place"), [*LAYOUTS, ((16, 300), P("data"))])
def test_sharded_moments_as_codes_are_a_single_devices_bit_for_bit(shape, place):
    tx, params, state, places = with_codes(shape, place)
    is_whole = shape[-1] % 1024 == 0 or place[0] == "data"  # blocks of 128 on each device
    assert state.inner[0].nu["w"].scale.sharding.is_fully_replicated is not is_whole
    step = jax.jit(lambda p, s, g: stepped(tx, p, s, g))
    one = jax.device_put((params, state), jax.devices()[0])
    found = two_steps(step, params, state)
    assert_same(found, two_steps(step, *one))
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    if (shape, place) in LAYOUTS:
        with jax.set_mesh(mesh):
            moved = {"w": jax.reshard(jnp.asarray(np.asarray(params["w"])), place)}
            assert_same(two_steps(step, moved, tx.init(moved)), found)
    kept = found[1].inner[0].mu["w"].qvalue
    assert kept.sharding.is_equivalent_to(places.inner[0].mu["w"].qvalue, kept.ndim)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("shape", "place"), [*LAYOUTS[:2], ((64, 64), P(None, "data"))])
def test_moments_in_8_bits_are_stepped_in_parts(shape, place, check_vma):
    if shape[-1] < 128 and not check_vma:
        pytest.skip("a scale of parts is shared where types tell so")
    tx, params, state, places = with_codes(shape, place, None if check_vma else "data")
    plain = wrapped(optax.adam(1e-2))
    step = mapped(lambda p, s, g: stepped(tx, p, s, g), ({"w": place}, specs_of(places)), check_vma)
    truth, _ = two_steps(functools.partial(stepped, plain), params, plain.init(params))
    new, state = two_steps(step, params, state)
    np.testing.assert_allclose(new["w"], truth["w"], atol=0.3 * 1e-2)
    scales = [np.asarray(x.data) for x in state.inner[0].nu["w"].scale.addressable_shards]
    if state.inner[0].nu["w"].scale.sharding.is_fully_replicated:
        assert all((x == scales[0]).all() for x in scales)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_sharded_state_on_the_host_trains_as_on_the_devices(in_parts):
    params, shardings = fully_sharded(jnp.bfloat16)
    ends = []
    for kind in (None, "pinned_host"):
        tx = wrapped(optax.adam(1e-2), "bfloat16", "remainder", state_memory_kind=kind)
        places = state_shardings(tx, params)
        state = jax.jit(tx.init, out_shardings=places)(params)
        one = lambda p, s, g, tx=tx: stepped(tx, p, s, g)  # noqa: E731
        step = mapped(one, specs_of((shardings, places))) if in_parts else one
        step = jax.jit(step, out_shardings=(shardings, places))
        ends.append(two_steps(step, params, state))
        assert jax.tree.map(lambda x: x.sharding, ends[-1][1]) == places
    assert ends[1][1].masters["hidden"].sharding.memory_kind == "pinned_host"
    assert_same(*ends)


def test_parts_of_a_block_are_rejected_by_name():
    tx, params, state, places = with_codes((64, 512), P(None, "data"))
    specs = {"w": P(None, "data")}, specs_of(places)
    text = r"0/mu/w is int8\[64, 64\] with scales float32\[64, 4\] instead of .*multiples of 128"
    with pytest.raises(ValueError, match=text):
        mapped(lambda p, s, g: stepped(tx, p, s, g), specs)(params, state, params)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_step_under_jit_works_on_a_mesh_of_explicit_axes(is_sharded):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    whole = jax.tree.map(lambda p: p.astype(jnp.bfloat16), F32)
    tx = wrapped(optax.adam(1e-2), "bfloat16", loss_scale="dynamic", clip_global_norm=0.5)

    def whole_of(param):  # what is written by hand where types say how arrays lie
        is_placed = is_sharded and not jax.typeof(param).sharding.mesh.empty
        return jax.reshard(param, EVERYWHERE) if is_placed else param

    @jax.jit
    def step(params, state, batch):
        gathered = lambda p, b: loss_fn(jax.tree.map(whole_of, p), b)  # noqa: E731
        scale = loss_scale_of(state)
        fn = value_and_grad(gathered, policy="bfloat16", loss_scale=scale, grads="compute")
        value, grads = accumulate_gradients(fn, params, split_batch(batch, 2))
        return *apply_gradients(tx, params, state, grads), value

    truth, end = curve(step, whole, tx.init(whole), BATCH, 3)
    with jax.set_mesh(mesh):
        params = {"hidden": EVERYWHERE, "head": SPLIT if is_sharded else EVERYWHERE}
        params = {name: jax.reshard(whole[name], place) for name, place in params.items()}
        losses, params = curve(step, params, tx.init(params), jax.reshard(BATCH, SPLIT), 3)
        assert params["head"].sharding.spec[0] == ("data" if is_sharded else None)
    np.testing.assert_allclose(losses, truth, rtol=0.01)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), params, end)

"""`state_memory_kind`: the state lies in the host's memory, and training is the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from mpmodules import nnx
from policy import (
    apply_gradients,
    compare,
    finite_of,
    init_from_master,
    master_params,
    state_shardings,
)
from policy.optim import convert, host_memory, resync
from tests.policy.optim.steps import BOTH_WAYS, assert_same, stepped, wrapped

KEY = jax.random.key(0)
PARAMS = {"w": jnp.linspace(-1, 1, 4096).reshape(32, 128).astype(jnp.bfloat16), "b": jnp.ones(3)}
GRADIENTS = {"w": jnp.cos(PARAMS["w"].astype(jnp.float32)), "b": jnp.ones(3)}
MOMENTS: Any = {"int8": {"mu": "int8", "nu": "int8"}, "float32": None}


def transforms(mode: str = "remainder", moments: str = "int8", **options: Any) -> Any:
    """Returns the transform with its state on the device, and with its state on the host."""
    options = {"moment_dtype": MOMENTS[moments], "loss_scale": "dynamic", **options}
    options |= {} if MOMENTS[moments] is None else {"key": KEY}
    adamw = optax.adamw(0.1)
    plain, tx = (
        wrapped(adamw, "bfloat16", mode, state_memory_kind=kind, **options)
        for kind in (None, "pinned_host")
    )
    return plain, tx


def kinds(tree: Any) -> Any:
    return {
        (leaf.ndim > 0 and leaf.dtype.itemsize > 1, leaf.sharding.memory_kind)
        for leaf in jax.tree.leaves(tree)
    }


ON_HOST = {(True, "pinned_host"), (False, "device")}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("through_optax", BOTH_WAYS)
@pytest.mark.parametrize("mode", ["remainder", "full", "none"])
def test_a_state_on_the_host_trains_as_one_on_the_device(mode, through_optax):
    (plain, tx), ends = transforms(mode), []
    for each in (plain, tx):
        params, state = PARAMS, each.init(PARAMS)
        step = jax.jit(lambda p, s, g, each=each: stepped(each, p, s, g, through_optax))
        for fault in (0, np.nan, 0):  # the second step is skipped
            given = jax.tree.map(lambda g, fault=fault: g + np.float32(fault), GRADIENTS)
            params, state = step(params, state, given)
        ends.append((params, state, master_params(params, state)))
        assert kinds(params) == {(True, "device")}
        assert kinds(state) == (ON_HOST if each is tx else {(True, "device"), (False, "device")})
    assert (ends[1][1].count, ends[1][1].skipped) == (2, 1)
    assert_same(ends[1], ends[0])
    eager = stepped(tx, PARAMS, tx.init(PARAMS), GRADIENTS, through_optax)
    assert kinds(eager[1]) == ON_HOST


@pytest.mark.slow
def test_it_is_a_scans_carry_and_works_under_clipping():
    plain, tx = transforms(clip_global_norm=1.0)

    def run(tx, state):
        step = lambda carry, _: (stepped(tx, *carry, GRADIENTS), None)  # noqa: E731
        return jax.lax.scan(step, (PARAMS, state), None, length=3)[0]

    found, truth = (jax.jit(lambda s, t=t: run(t, s))(t.init(PARAMS)) for t in (tx, plain))
    assert kinds(found[1]) == ON_HOST
    assert_same(found, truth)


def test_shardings_are_of_the_hosts_memory_and_buffers_are_donated():
    tx = transforms()[1]
    shardings = state_shardings(tx, PARAMS)
    state = jax.jit(tx.init, out_shardings=shardings)(PARAMS)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    assert kinds(state) == ON_HOST
    params = jax.tree.map(jnp.copy, PARAMS)
    places = jax.tree.map(lambda p: p.sharding, params), shardings
    step = lambda p, s: stepped(tx, p, s, GRADIENTS)  # noqa: E731
    donating: Any = jax.jit(step, donate_argnums=(0, 1), out_shardings=places)
    _, after = donating(params, state)
    assert jax.tree.map(lambda x: x.sharding, after) == shardings
    arrays = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.ndim]
    assert all(leaf.is_deleted() for leaf in arrays)


@pytest.mark.slow
def test_masters_on_the_host_are_read_written_and_converted():
    plain, tx = transforms("full")
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), PARAMS)
    params, state = init_from_master(tx, wide)
    assert kinds(state) == ON_HOST
    assert_same(master_params(params, state), wide)
    written = {**params, "w": params["w"] + 1}
    for follow in (resync, jax.jit(resync)):
        after = follow(written, state)
        assert kinds(after.masters) == {(True, "pinned_host")}
        assert_same(master_params(written, after), {**wide, "w": written["w"].astype(jnp.float32)})
    moved = convert(state, params, to=plain)
    assert_same(moved, plain.init(params))
    assert kinds(moved) == {(True, "device"), (False, "device")}
    assert kinds(convert(moved, params, to=tx)) == ON_HOST
    # a state that was restored into the device's memory goes back
    assert kinds(apply_gradients(tx, params, moved, GRADIENTS)[1]) == ON_HOST


@pytest.mark.slow
def test_a_train_state_and_an_nnx_optimizer_hold_it():
    plain, tx = transforms("remainder", loss_scale=None)
    make = lambda tx: TrainState.create(apply_fn=optax.sgd, params=PARAMS, tx=tx)  # noqa: E731
    step = jax.jit(lambda state: state.apply_gradients(grads=GRADIENTS))
    with jax.numpy_dtype_promotion("standard"):
        found, truth = step(make(tx)), step(make(plain))
    assert kinds(found.opt_state) == ON_HOST
    assert_same((found.params, found.opt_state), (truth.params, truth.opt_state))

    @nnx.jit
    def update(model, optimizer):
        loss = lambda model: jnp.sum(model(jnp.ones((2, 64))).astype(jnp.float32))  # noqa: E731
        gradients = nnx.grad(loss)(model)
        optimizer.update(model, gradients)

    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0), dtype_policy="bfloat16")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with jax.numpy_dtype_promotion("standard"):
        update(model, optimizer)
    assert kinds(nnx.state(optimizer.opt_state)) == ON_HOST
    assert finite_of(optimizer) and optimizer.opt_state.count[...] == 1


@pytest.mark.slow
def test_compare_measures_it_as_a_state_on_the_device():
    rows = []
    for tx in transforms("remainder", "float32", loss_scale=None):
        step = lambda p, s, x, tx=tx: stepped(tx, p, s, {**GRADIENTS, "w": x @ p["w"]})  # noqa: E731
        given = PARAMS, tx.init(PARAMS), jnp.ones((32, 32), jnp.bfloat16) / 32
        found = compare(jax.jit(step), *given)
        rows.append([(row.path, row.error) for row in found.rows if row.kind == "output"])
    assert rows[0] == rows[1] and max(rows[0], key=lambda row: row[1])[1] > 0


@pytest.mark.slow
def test_memories_that_the_device_lacks_are_rejected(monkeypatch):
    with pytest.raises(ValueError, match="should be 'pinned_host' or None, but got 'host'"):
        wrapped(state_memory_kind="host")
    monkeypatch.setattr(host_memory, "_kinds_of", lambda device: ["device"])
    with pytest.raises(ValueError, match=r"got 'pinned_host', and .* has device: leave"):
        transforms()[1].init(PARAMS)

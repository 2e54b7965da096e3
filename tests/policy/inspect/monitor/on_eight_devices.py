"""Snapshots on eight devices beside those on one, with one bad batch and one bad device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import policy
from tests.policy.inspect.monitor.test_monitor import given, rows_of, sgd

P = PartitionSpec
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def data():
    params, _ = given()
    return params, jax.random.normal(jax.random.key(3), (64, 4))


def mapped(params, x):
    """`sgd` with a part of the batch on each device, in a `shard_map`."""

    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def step(params, x):
        def loss_of(params, x):
            with jax.named_scope("up"):
                hidden = jnp.exp(x @ params["up"])
            with jax.named_scope("head"):
                return jnp.mean((hidden @ params["head"]) ** 2)

        local = jax.lax.pcast(params, "data", to="varying")
        loss, gradients = jax.value_and_grad(loss_of)(local, x)
        gradients = jax.lax.pmean(gradients, "data")
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return new, jax.lax.pmean(loss, "data")

    return step(params, x)


def alone(params, x):
    def loss_of(params):
        with jax.named_scope("up"):
            hidden = jnp.exp(x @ params["up"])
        with jax.named_scope("head"):
            return jnp.mean((hidden @ params["head"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def record_of(step, *args, number=0):
    result, snapshot = jax.jit(policy.monitor(step))(number, *args)
    return result, snapshot.record()


def compared(rows, others, kinds):
    for where, row in others.items():
        if where[1] not in kinds:
            continue
        assert rows[where]["size"] == row["size"], where
        for name, number in row["numbers"].items():
            np.testing.assert_allclose(
                rows[where]["numbers"][name],
                number,
                rtol=1e-4,
                atol=1e-12,
                err_msg=f"{where} {name}",
            )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_have_the_statistics_of_one_device(kind):
    params, x = data()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    _, expected = record_of(sgd, params, x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        _, record = record_of(sgd, whole, sharded)
    compared(
        rows_of(record), rows_of(expected), ("activation", "gradient", "param", "update", "input")
    )


def test_shards_of_a_shard_map_are_measured_together():
    params, x = data()
    _, expected = record_of(alone, params, x)
    (after, loss), record = record_of(mapped, params, x)
    jax.tree.map(np.testing.assert_array_equal, (after, loss), jax.jit(mapped)(params, x))
    rows = {where: row for where, row in rows_of(expected).items() if where[0] != "head"}
    compared(rows_of(record), rows, ("activation", "param", "update", "input"))


@pytest.mark.parametrize("of", [alone, mapped])
def test_what_overflows_on_one_device_is_named(of):
    params, x = data()
    sharded = jax.device_put(x.at[42].set(1e4), NamedSharding(MESH, P("data")))
    _, record = record_of(of, params, sharded, number=7)
    first = record["first"]
    assert record["outputs"]
    assert (first["path"], first["operation"]) == ("up", "exp")


@pytest.mark.parametrize("of", [alone, mapped])
def test_two_programs_have_the_records_of_one(of):
    params, x = data()
    whole = NamedSharding(MESH, P())
    step = policy.monitor(of, jit=functools.partial(jax.jit, donate_argnums=0))
    for number, value in ((0, 1.0), (6, 1.0), (7, 1e4)):
        batch = jax.device_put(x.at[42:44].set(value), NamedSharding(MESH, P("data")))
        after, snapshot = step(number, jax.device_put(data()[0], whole), batch)
        expected, record = record_of(of, params, batch, number=number)
        jax.tree.map(np.testing.assert_array_equal, after, expected)
        assert snapshot.record() == record and (number == 6) == (record is None)


def test_an_update_inside_of_a_shard_map_is_lost_alike():
    params = {"w": jnp.exp(jnp.linspace(-9.0, 1.0, 64)).reshape(64, 1).astype(jnp.bfloat16)}
    tx = optax.sgd(1e-4)

    def step(params):
        def local(w):
            updates, _ = tx.update({"w": jnp.ones_like(w)}, tx.init({"w": w}))
            new: Any = optax.apply_updates({"w": w}, updates)
            return new["w"]

        spec = P("data")
        return {"w": jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=spec)(params["w"])}

    with jax.numpy_dtype_promotion("standard"):
        after, record = record_of(step, params)
    lost = rows_of(record)["w", "update"]["numbers"]["lost"]
    assert lost == np.mean(np.asarray(params["w"] == after["w"])) and 0 < lost < 1

"""Snapshots of steps of nnx modules and optimizers, ours and Flax's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import nnx
from tests.policy.inspect.monitor.test_monitor import rows_of


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(4, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(nnx.relu(self.norm(self.up(x)))))


def train_step(model, optimizer, x):
    def loss_of(model):
        return jnp.mean(jnp.square(model(x).astype(jnp.float32)))

    scale = policy.loss_scale_of(optimizer)
    loss, gradients = nnx.value_and_grad(loss_of, loss_scale=scale)(model)
    optimizer.update(model, gradients)
    return loss


def made(dtype_policy):
    model = Net(nnx.Rngs(0), dtype_policy=dtype_policy)
    tx = policy.mixed_precision(optax.adam(1e-4), dtype_policy, loss_scale="dynamic")
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


X = jax.random.normal(jax.random.key(1), (8, 4))
PARAMS = {f"{name}/{leaf}" for name in ("up", "head") for leaf in ("bias", "kernel")}
PARAMS |= {"norm/bias", "norm/scale"}


@pytest.mark.parametrize("dtype_policy", ["mixed_float16", "bfloat16"])
def test_a_step_of_modules_returns_a_snapshot_and_their_new_state(dtype_policy):
    model, optimizer = made(dtype_policy)
    other, other_optimizer = made(dtype_policy)
    step = nnx.jit(policy.monitor(train_step, every=2))
    plain = nnx.jit(train_step)
    snapshots = []
    for i in range(3):
        loss, snapshot = step(i, model, optimizer, X)
        assert loss == plain(other, other_optimizer, X)
        snapshots.append(snapshot)
    states = (flax_nnx.state(each, flax_nnx.Variable) for each in (model, other))
    jax.tree.map(_equal, *states)
    record: Any = snapshots[-1].record()
    rows = rows_of(record)
    for kind in ("gradient", "param", "update"):
        assert {path for path, one in rows if one == kind} == PARAMS
    modules = {path for path, kind in rows if kind == "activation"}
    assert modules == {"up", "norm", "drop", "head", "Net:"}
    assert {path for path, kind in rows if kind == "input"} == {"x"}
    assert record["loss_scale"] == 2.0**15 and not record["skipped"]
    # bfloat16 params have remainders, which lose nothing
    assert all(row["numbers"]["lost"] == 0 for (_, kind), row in rows.items() if kind == "update")


def _equal(x, y):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x, y = (jax.random.key_data(z) if is_key else z for z in (x, y))
    np.testing.assert_array_equal(x, y)


def test_a_step_of_modules_that_overflows_is_skipped_and_named():
    model, optimizer = made("mixed_float16")
    model.up.kernel[...] = model.up.kernel[...].at[0, 0].set(6e4)
    _, snapshot = nnx.jit(policy.monitor(train_step))(5, model, optimizer, 10 * X)
    record: Any = snapshot.record()
    assert record["outputs"] and record["skipped"]
    first = record["first"]
    assert (first["path"], first["direction"]) == ("up", "forward")
    assert first["line"].startswith("test_nnx.py:")


def test_flaxs_own_optimizer_loses_updates_of_half_params():
    model = flax_nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=flax_nnx.Rngs(0))
    optimizer = flax_nnx.Optimizer(model, optax.sgd(1e-5), wrt=flax_nnx.Param)

    def step(model, optimizer, x):
        loss_of = lambda model: jnp.mean(jnp.square(model(x)))  # noqa: E731
        loss, gradients = flax_nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    with jax.numpy_dtype_promotion("standard"):
        _, snapshot = flax_nnx.jit(policy.monitor(step))(0, model, optimizer, X)
    rows = rows_of(snapshot.record())
    assert rows["kernel", "update"]["numbers"]["lost"] > 0.5

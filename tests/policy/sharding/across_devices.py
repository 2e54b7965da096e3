"""Data parallel steps on eight devices, for the tests that run there, and the small model that they
train.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from policy import apply_gradients, loss_scale_of, value_and_grad
from policy.grads import accumulate_gradients, split_batch
from policy.sharding import all_reduce, vary

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
    """Data parallel under shard_map: each device's own gradients, one all-reduce, the same step on
    each.
    """

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
        value, grads = accumulate_gradients(
            fn, vary(params, "data"), split_batch(batch, microbatches)
        )
        params, state, finite = apply_gradients(tx, params, state, all_reduce(grads, "data", dtype))
        return params, state, finite, lax.pmean(value, "data")

    return step


def plain_step(tx, loss, policy="mixed_bfloat16"):
    """One device, or jit over sharded arrays."""

    @jax.jit
    def step(params, state, batch):
        value, grads = value_and_grad(
            loss, policy=policy, loss_scale=loss_scale_of(state), grads="compute"
        )(params, batch)
        return *apply_gradients(tx, params, state, grads), value

    return step


def curve(step, params, state, batch, steps=5):
    losses = []
    for _ in range(steps):
        params, state, finite, loss = step(params, state, batch)
        assert finite
        losses.append(float(loss))
    return losses, params


def fully_sharded(dtype):
    """Params split over the devices, and where each lies."""
    shardings = {
        "hidden": NamedSharding(MESH, PartitionSpec(None, "data")),
        "head": NamedSharding(MESH, SPLIT),
    }
    return jax.device_put(jax.tree.map(lambda p: p.astype(dtype), F32), shardings), shardings


def sharded_step(tx, loss, param_specs, state_specs, check_vma=True):
    """Each device keeps a part of each param, gathers the whole inside the loss, and gets its
    part's gradient back.
    """

    def gathered(params, batch):
        axes = {"hidden": 1, "head": 0}
        whole = jax.tree.map(
            lambda p, axis: lax.all_gather(p, "data", axis=axis, tiled=True), params, axes
        )
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
        value, grads = value_and_grad(gathered, loss_scale=loss_scale_of(state), grads="compute")(
            params, batch
        )
        params, state, finite = apply_gradients(tx, params, state, grads)
        return params, state, finite, lax.psum(value, "data")

    return step

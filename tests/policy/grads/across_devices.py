"""Data parallel steps on eight devices, for the tests that run there, and the small model that they
train.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from policy import accumulate_gradients, apply_gradients, loss_scale_of, split_batch, value_and_grad
from policy.sharding import all_reduce, vary

DEVICES = 8
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("data")
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
BATCH = jnp.float32(RNG.normal(size=(32, 4))), jnp.float32(RNG.normal(size=(32, 1)))
F32 = {
    "hidden": jnp.float32(RNG.normal(size=(4, 16)) / 2),
    "head": jnp.float32(RNG.normal(size=(16, 1)) / 4),
}


def loss_fn(params, batch, dtype=jnp.bfloat16):
    x, y = batch
    hidden = jnp.tanh(x.astype(dtype) @ params["hidden"].astype(dtype))
    return jnp.mean(jnp.square((hidden @ params["head"].astype(dtype)).astype(jnp.float32) - y))


def f32_loss(params, batch):
    return loss_fn(params, batch, jnp.float32)


def placed(tree, spec):
    return jax.device_put(tree, jax.tree.map(lambda _: NamedSharding(MESH, spec), tree))


def on_the_mesh(step, param_specs=EVERYWHERE, state_specs=EVERYWHERE, check_vma=True):
    specs = param_specs, state_specs
    out_specs = (*specs, EVERYWHERE, EVERYWHERE)
    options = {"mesh": MESH, "in_specs": (*specs, SPLIT), "out_specs": out_specs}
    return jax.jit(jax.shard_map(step, **options, check_vma=check_vma))


def replicated_step(tx, loss, dtype, policy="mixed_bfloat16", check_vma=True, microbatches=1):
    """Data parallel under shard_map: each device's own gradients, one all-reduce, the same step on
    each.
    """

    def step(params, state, batch):
        fn = value_and_grad(loss, policy=policy, loss_scale=loss_scale_of(state), grads="compute")
        batches = split_batch(batch, microbatches)
        value, grads = accumulate_gradients(fn, vary(params, "data"), batches)
        params, state, finite = apply_gradients(tx, params, state, all_reduce(grads, "data", dtype))
        return params, state, finite, lax.pmean(value, "data")

    return on_the_mesh(step, check_vma=check_vma)


def plain_step(tx, loss, policy="mixed_bfloat16"):
    """One device, or jit over sharded arrays."""

    @jax.jit
    def step(params, state, batch):
        fn = value_and_grad(loss, policy=policy, loss_scale=loss_scale_of(state), grads="compute")
        value, grads = fn(params, batch)
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
        gather = lambda p, axis: lax.all_gather(p, "data", axis=axis, tiled=True)  # noqa: E731
        return loss(jax.tree.map(gather, params, axes), batch) / DEVICES

    def step(params, state, batch):
        fn = value_and_grad(gathered, loss_scale=loss_scale_of(state), grads="compute")
        value, grads = fn(params, batch)
        params, state, finite = apply_gradients(tx, params, state, grads)
        return params, state, finite, lax.psum(value, "data")

    return on_the_mesh(step, param_specs, state_specs, check_vma)

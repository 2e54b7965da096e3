"""Runs on eight devices: one that goes wrong, a bad shard of a batch, and clean ones.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m \\
        tests.policy.inspect.runs.corpus.on_eight_devices NAME    # prints the records
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from policy.inspect.runs.advice_kinds import BATCH, DEVICE
from tests.eight_devices import run_python
from tests.policy.inspect.runs.corpus.training import (
    BF16,
    CLEAN,
    F16,
    FAULTS,
    WIDTH,
    Case,
    batches,
    plain,
    plain_params,
    rows_set,
    squared,
    times,
    watch,
)

MESH = "data"
FLAGS = "--xla_force_host_platform_device_count=8"


def by_hand(data, dtype=F16):
    """Trains data-parallel, by a `shard_map` that averages the gradients."""
    mesh = jax.make_mesh((8,), (MESH,), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.apply_if_finite(optax.sgd(1e-3), 100)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(MESH), P(MESH)), out_specs=P(), check_vma=False
    )
    def gradients(params, x, y):
        def loss(params):
            with jax.named_scope("up"):
                h = x.astype(dtype) @ params["up"].astype(dtype)
            with jax.named_scope("inner"):
                h = h * h
            with jax.named_scope("head"):
                return squared(h @ params["head"].astype(dtype), y)

        return jax.lax.pmean(jax.value_and_grad(loss)(params), MESH)

    def step(params, opt_state, x, y):
        value, grads = gradients(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = plain_params()
    del params["out"]
    params["up"] = jnp.eye(WIDTH)
    return watch(step, (params, tx.init(params)), data)


def sharded(data):
    """Trains data-parallel by the shardings of the inputs."""
    mesh = jax.make_mesh((8,), (MESH,), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, P(MESH))
    placed = ([jax.device_put(one, place) for one in batch] for batch in data)
    return plain(jnp.tanh, placed, dtype=BF16)


RUNS = {
    "a shard whose squares overflow": lambda: by_hand(
        batches(rows=32, **{f"at_{i}": times(400.0, 22) for i in (5, 6, 7)})
    ),
    "a sharded batch with a nan": lambda: sharded(batches(rows=32, at_6=rows_set(np.nan, 9))),
    "eight devices by hand": lambda: by_hand(batches(rows=32), BF16),
    "eight devices by shardings": lambda: sharded(batches(rows=32)),
}


def in_a_process(name):
    module = "tests.policy.inspect.runs.corpus.on_eight_devices"
    return json.loads(run_python("-m", module, name, XLA_FLAGS=FLAGS).splitlines()[-1])


_NAMES = [*RUNS]
FAULTS += [
    Case(_NAMES[0], functools.partial(in_a_process, _NAMES[0]), DEVICE, ("inner",), 5, "h = h * h"),
    Case(_NAMES[1], functools.partial(in_a_process, _NAMES[1]), BATCH, ("x", "2", "0", ""), 6),
]
CLEAN += [Case(name, functools.partial(in_a_process, name)) for name in _NAMES[2:]]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    print(json.dumps(RUNS[sys.argv[1]]()))

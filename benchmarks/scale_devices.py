"""How a data-parallel train step grows with devices, to 64 of them: none is real, and nothing is
run.

Traced, devices are a `jax.sharding.AbstractMesh`. Compiled, they are the CPU's, in a process of its
own, as XLA fixes their number when it starts:

    XLA_FLAGS=--xla_force_host_platform_device_count=64 python -m benchmarks.scale_devices
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import all_reduce
from benchmarks.scale_lines import equations, straight
from benchmarks.table import Row
from policy import apply_gradients, loss_scale_of, mixed_precision, state_shardings, value_and_grad
from policy.sharding import Collective, collectives_of

DEVICES = (1, 2, 4, 8, 16, 32, 64)
EXACT, TIMED = 1.01, 1.5
WIDTH, HIDDEN, BATCH = 512, 2048, 128
# What is read of a compiled program, and how the table names it.
QUANTITIES = {
    "held": "held",
    "temporary": "temporary",
    "instructions": "HLO",
    "compiling": "compiling",
}


# --------------------------------------------------------------------------------------------------
# Traced: shard_map over a mesh without devices
# --------------------------------------------------------------------------------------------------


def step_on(devices: int) -> tuple[Any, tuple[Any, ...]]:
    """A train step under `jax.shard_map` that sums gradients in bfloat16, and the shapes of its
    arguments.
    """
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    init, train = all_reduce.ours("bfloat16")()
    specs = PartitionSpec(), PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    params = _params()
    return mapped, (
        params,
        jax.eval_shape(init, params),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
    )


def _params() -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def wire(collectives: list[Collective]) -> float:
    """Bytes a param that a device sends or receives at least: the results of its collectives."""
    total = sum(c.size * jnp.dtype(c.dtype).itemsize for c in collectives)
    return total / sum(leaf.size for leaf in _params().values())


def traced_rows(devices: tuple[int, ...]) -> Iterator[Row]:
    """What `jax.shard_map` was told, on the most devices and on two."""
    ends = {}
    for number in (2, devices[-1]):
        step, arguments = step_on(number)
        jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
        found = collectives_of(step, *arguments, stage="traced")
        ends[number] = {"equations": equations(jaxpr), "exchanges": len(found), "wire": wire(found)}
    for quantity, near in ends[2].items():
        far = ends[devices[-1]][quantity]
        yield Row(quantity, f"data parallel, {devices[-1]} / 2 devices", far, near, 1.0, 1.0)


# --------------------------------------------------------------------------------------------------
# Compiled: params, state and batch sharded over CPU devices
# --------------------------------------------------------------------------------------------------


def sharded_step(mesh: Mesh, *, ours: bool) -> tuple[Any, tuple[Any, ...]]:
    """A step whose params and optimizer state are split over all devices (ZeRO-3), and the shapes
    of its arguments.
    """
    split, everywhere = (
        NamedSharding(mesh, PartitionSpec("data")),
        NamedSharding(mesh, PartitionSpec()),
    )
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=split), _params()
    )
    if ours:
        tx = mixed_precision(optax.adamw(1e-3), "mixed_bfloat16", loss_scale=1024.0)
        shardings = state_shardings(tx, params)
    else:
        tx = optax.adamw(1e-3)
        state = jax.eval_shape(tx.init, params)
        shardings = jax.tree.map(lambda leaf: split if leaf.ndim else everywhere, state)
    state = jax.eval_shape(tx.init, params)

    def by_hand(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(all_reduce.loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def step(params: Any, state: Any, batch: Any) -> Any:
        fn = value_and_grad(all_reduce.loss_fn, loss_scale=loss_scale_of(state), grads="compute")
        loss, grads = fn(params, batch)
        return *apply_gradients(tx, params, state, grads)[:2], loss

    where = jax.tree.map(lambda _: split, params), shardings
    jitted = jax.jit(
        step if ours else by_hand,
        in_shardings=(*where, split),
        out_shardings=(*where, everywhere),
        donate_argnums=(0, 1),
    )
    return jitted, (params, state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


def compiled_on(devices: int, *, ours: bool) -> dict[str, float]:
    """What the program of one of the devices holds and is, and CPU seconds to compile it.

    Returns:
      `held`: bytes of its params, state and batch, times the devices; `temporary`; `instructions`;
      `compiling`.

    Raises:
      RuntimeError: the process has fewer devices.
    """
    if jax.device_count() < devices:
        raise RuntimeError(
            f"This process has {jax.device_count()} devices, not {devices}: start it with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}."
        )
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    jitted, arguments = sharded_step(mesh, ours=ours)
    lowered = jitted.lower(*arguments)
    start = time.process_time()
    compiled = lowered.compile()
    compiling = time.process_time() - start
    memory = compiled.memory_analysis()
    return {
        "held": memory.argument_size_in_bytes * devices,
        "temporary": memory.temp_size_in_bytes,
        "instructions": compiled.as_text().count(" = "),
        "compiling": compiling,
    }


def in_own_process(devices: tuple[int, ...]) -> dict[str, dict[int, dict[str, float]]]:
    """`compiled_on` for each number of devices, ours and by hand."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(devices)}"
    )
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale_devices", *map(str, devices)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"Compiling for {max(devices)} devices failed: {result.stderr[-2000:]}")
    found = json.loads(result.stdout.splitlines()[-1])
    return {
        name: {int(number): figures for number, figures in at.items()} for name, at in found.items()
    }


def compiled_rows(devices: tuple[int, ...]) -> Iterator[Row]:
    """Beside plain optax on the most devices, and the most devices beside two.

    XLA:CPU writes an exchange of all with all as an operand for each device. So programs grow with
    devices, by hand too; what ours adds to them must not grow.
    """
    found = in_own_process(devices)
    ours, hand = (
        {q: [at[n][q] for n in devices] for q in QUANTITIES}
        for at in (found["ours"], found["by hand"])
    )
    last, two = devices[-1], devices.index(2)
    ends = f"{last} / 2 devices"
    for quantity, name in QUANTITIES.items():
        yield Row(
            name,
            f"sharded beside plain optax, {last} devices",
            ours[quantity][-1],
            hand[quantity][-1],
        )
        bound = EXACT if quantity in ("held", "temporary") else None
        yield Row(name, f"sharded, {ends}", ours[quantity][-1], ours[quantity][two], bound)
        yield Row(name, f"sharded by hand, {ends}", hand[quantity][-1], hand[quantity][two])
    added = [a - b for a, b in zip(ours["instructions"], hand["instructions"], strict=True)]
    yield Row("HLO", f"sharded less by hand, {ends}", added[-1], added[two], EXACT)
    yield straight("HLO", "sharded, a device", devices[two:], ours["instructions"][two:], TIMED)
    grown, grown_by_hand = (at["compiling"][-1] / at["compiling"][two] for at in (ours, hand))
    yield Row("compiling", f"growth beside by hand's, {ends}", grown, grown_by_hand, TIMED)


def rows(small: bool) -> Iterator[Row]:
    """Every row; `small` compiles nothing."""
    yield from traced_rows(DEVICES)
    if not small:
        yield from compiled_rows(DEVICES)


def main() -> None:
    """Prints the figures of the process's own devices, as JSON."""
    devices = [int(number) for number in sys.argv[1:]] or list(DEVICES)
    compiled_on(1, ours=False)  # what a process loads once
    kinds = {"ours": True, "by hand": False}
    print(
        json.dumps(
            {name: {n: compiled_on(n, ours=ours) for n in devices} for name, ours in kinds.items()}
        )
    )


if __name__ == "__main__":
    main()

"""What data parallel training exchanges, and what the step after it moves: gradients in bfloat16,
weights in float32.

    python -m benchmarks.all_reduce          # the table: 10 s on one core; nothing is run
    python -m benchmarks.all_reduce --check  # exits with 1 where a row exchanges another dtype, or
                                             # is above its budget
    python -m benchmarks.all_reduce --json FILE

Two kernels of 1M elements each, on eight CPU devices. Collectives are read from the program as
XLA's partitioner left it (XLA:CPU sums in float32 later on, whatever was asked for).

wire   bytes of their results, an element of the params, beside a number of the dtype that gradients
       are asked to cross in.
step   XLA's count of the bytes that AdamW moves, an element, from the gradients as they were
       exchanged, beside the step's budget.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import optimizer
from benchmarks.optimizer import BF16, F32
from benchmarks.table import Row, run
from policy import apply_gradients, loss_scale_of, mixed_precision, value_and_grad
from policy.sharding import Collective, all_reduce, collectives_of, vary

DEVICES = 8
WIDTH, HIDDEN, BATCH = 512, 2048, 64
ELEMENTS = 2 * WIDTH * HIDDEN
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("data")
Train = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A train step, and what it should exchange.

    Attributes:
      name: as it is printed.
      make: the optimizer's init, and a train step of params, its state and a batch.
      step: the optimizer's step by itself, and its budget.
      exchanged: what gradients cross in.
      mapped: whether the train step runs under `jax.shard_map`; otherwise under `jax.jit` with
        sharded arrays.
    """

    name: str
    make: Callable[[], tuple[Callable[[Any], Any], Train]]
    step: optimizer.Pipeline
    exchanged: str
    mapped: bool = True


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(batch.astype(BF16) @ params["up"].astype(BF16))
    return jnp.mean(jnp.square((hidden @ params["down"].astype(BF16)).astype(F32)))


def ours(dtype: str | None, **options: Any) -> Callable[[], tuple[Callable[[Any], Any], Train]]:
    """This library's step; a dtype of None leaves the exchange to the partitioner."""

    def make() -> tuple[Callable[[Any], Any], Train]:
        tx = mixed_precision(optax.adamw(1e-3), "mixed_bfloat16", loss_scale=1024.0, **options)

        def train(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            fn = value_and_grad(
                loss_fn, policy="mixed_bfloat16", loss_scale=loss_scale_of(state), grads="compute"
            )
            if dtype is None:
                loss, grads = fn(params, batch)
            else:
                loss, grads = fn(vary(params, "data"), batch)
                loss, grads = lax.pmean(loss, "data"), all_reduce(grads, "data", dtype)
            return *apply_gradients(tx, params, state, grads)[:2], loss

        return tx.init, train

    return make


def pmean_of_gradients() -> tuple[Callable[[Any], Any], Train]:
    """The step of Flax's examples: JAX's gradients of float32 params, `lax.pmean`, plain optax."""
    tx = optax.adamw(1e-3)

    def train(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        loss, grads = lax.pmean(jax.value_and_grad(loss_fn)(own, batch), "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return tx.init, train


def steps() -> list[Exchange]:
    """Returns every train step, the peer first."""
    alone = {row.name: row for row in optimizer.pipelines()}
    plain = optimizer.Pipeline("plain optax, f32 / f32", F32, F32, optimizer.plain)
    half = optimizer.Pipeline(
        "remainder", BF16, BF16, optimizer.ours(master_weights="remainder"), 52
    )
    return [
        Exchange("JAX and optax: pmean of the gradients", pmean_of_gradients, plain, "float32"),
        Exchange("bf16 all-reduce, f32 weights", ours("bfloat16"), alone["f32 / bf16"], "bfloat16"),
        Exchange(
            "bf16 all-reduce, f32 weights, no skipping",
            ours("bfloat16", skip_nonfinite=False),
            alone["f32 / bf16, no skipping"],
            "bfloat16",
        ),
        Exchange("f32 all-reduce, f32 weights", ours("float32"), alone["f32 / f32"], "float32"),
        Exchange(
            "bf16 all-reduce, bf16 weights",
            ours("bfloat16", master_weights="remainder"),
            half,
            "bfloat16",
        ),
        Exchange(
            "jit with sharded arrays, f32 weights",
            ours(None),
            alone["f32 / bf16"],
            "bfloat16",
            mapped=False,
        ),
    ]


def exchanges(row: Exchange) -> list[Collective]:
    """Returns every collective of a train step on all devices. Compiles; runs nothing."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    init, train = row.make()
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, row.step.params) for name, shape in shapes.items()}
    args = params, jax.eval_shape(init, params), jax.ShapeDtypeStruct((BATCH, WIDTH), F32)
    specs = EVERYWHERE, EVERYWHERE, SPLIT
    if row.mapped:
        train = jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=EVERYWHERE)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    return collectives_of(jax.jit(train, in_shardings=shardings, donate_argnums=(0, 1)), *args)


def wire(collectives: Sequence[Collective]) -> float:
    """Bytes of what is exchanged, an element of the params."""
    return sum(c.size * jnp.dtype(c.dtype).itemsize for c in collectives) / ELEMENTS


def rows(small: bool = False) -> Iterator[Row]:
    """Yields the rows of each train step; all are small."""
    del small
    for step in steps():
        found = exchanges(step)
        told = "; ".join(map(str, found))
        bytes_asked = jnp.dtype(step.exchanged).itemsize
        dtypes = {c.dtype for c in found if c.size > 1}
        others = ", ".join(sorted(dtypes)) or "none"
        wrong = "" if dtypes == {step.exchanged} else f"exchanges of {step.exchanged}: {others}"
        yield Row("wire", step.name, wire(found), bytes_asked, note=told, unknown=wrong)
        moved, _ = optimizer.measure(step.step)
        budget = step.step.budget
        yield Row("step", step.name, moved, budget or moved, None if budget is None else 1.0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sys.exit(run(__doc__, rows, "asked"))

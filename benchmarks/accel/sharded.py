"""A whole train step whose params, state and batch are sharded over every chip, beside the same
step by hand.

    python -m benchmarks.accel.sharded  # the table, of sixteen v5e chips: 5 minutes of two cores
    python -m benchmarks.accel.sharded --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.sharded --small  # one block of a 64th of the size, of four chips
    python -m benchmarks.accel.sharded --json FILE

Four blocks of 2048 x 8192 with LayerNorm and gelu, 4096 rows, adamw, params and state donated. By
hand is Flax's linen with dtype=bfloat16, `jax.value_and_grad` and optax, and
`optax.apply_if_finite` where a step is to be skipped.

cycles     the compiler's estimate of one step on one chip; of a conditional the costlier branch.
temp       the peak of temporary memory.
exchanged  bytes that one chip receives by collectives. It only reports: XLA exchanges params in
           bfloat16 in every step.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.accel.targets import Target  # first: it sets what JAX reads when it is imported

# isort: split
import flax.linen
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.accel.program import Figures, measure
from benchmarks.table import Row, run
from mpmodules import linen
from policy import apply_gradients, loss_scale_of, mixed_precision, state_shardings, value_and_grad

Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and its batch."""

    target: str = "v5e:4x4"
    blocks: int = 4
    width: int = 2048
    hidden: int = 8192
    rows: int = 4096


SMALL = Size("v5e:2x2", 1, 256, 1024, 512)


def model_of(api: Any, size: Size, **options: Any) -> Any:
    """Returns the model's class over `api`, its layers made with `options`."""

    class Block(api.Module):
        @api.compact
        def __call__(self, x: jax.Array) -> jax.Array:  # (rows, width) -> (rows, width)
            y = api.LayerNorm(**options)(x)
            y = api.gelu(api.Dense(size.hidden, **options)(y))
            return x + api.Dense(size.width, **options)(y)

    class Model(api.Module):
        @api.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x.astype(options.get("dtype", x.dtype))
            for _ in range(size.blocks):
                x = Block()(x)
            return x

    return Model


def loss_of(model: Any, params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model.apply({"params": params}, batch).astype(jnp.float32)))


def by_hand(size: Size, tx: optax.GradientTransformation) -> tuple[Any, Any, Step]:
    """Returns Flax's model, the optimizer and a step."""
    model = model_of(flax.linen, size, dtype=jnp.bfloat16)()

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, model))(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return model, tx, step


def ours(size: Size, policy: str = "mixed_bfloat16", **options: Any) -> tuple[Any, Any, Step]:
    """Returns our model, optimizer and step under a policy."""
    model = model_of(linen, size)(dtype_policy=policy)
    tx = mixed_precision(optax.adamw(1e-3), policy, **options)

    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, Any]:
        differentiated = value_and_grad(
            functools.partial(loss_of, model),
            loss_scale=loss_scale_of(state),
            policy=policy,
            grads="compute",
        )
        loss, gradients = differentiated(params, batch)
        params, state, _ = apply_gradients(tx, params, state, gradients)
        return params, state, loss

    return model, tx, step


def figures(size: Size, made: tuple[Any, Any, Step]) -> Figures:
    """Measures a step whose params, state and batch are split over all chips along their first
    axis.
    """
    model, tx, step = made
    mesh = Target(size.target).mesh()
    split = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = jax.ShapeDtypeStruct((size.rows, size.width), jnp.float32, sharding=split)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=split), params)
    state = jax.eval_shape(tx.init, params)
    if isinstance(tx, optax.GradientTransformationExtraArgs) and hasattr(tx, "recipe"):
        shardings = state_shardings(tx, params)
    else:
        shardings = jax.tree.map(lambda leaf: split if leaf.ndim else everywhere, state)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, shardings
    )
    out = (
        jax.tree.map(lambda p: p.sharding, params),
        jax.tree.map(lambda leaf: leaf.sharding, state),
        everywhere,
    )
    return measure(
        Target(size.target), step, (params, state, batch), donated=(0, 1), out_shardings=out
    )


BY_HAND, IF_FINITE = "by hand", "by hand, apply_if_finite"
OURS, NO_SKIPPING, IN_BFLOAT16 = "ours", "ours, no skipping", "ours, params in bfloat16, remainders"
# The largest ratios to `by hand`: of cycles, and of temporary memory.
BOUNDS: dict[str, tuple[float | None, float | None]] = {
    IF_FINITE: (None, None),
    NO_SKIPPING: (1.02, 1.05),
    OURS: (1.05, 1.05),
    IN_BFLOAT16: (1.05, 1.05),
}


def steps(size: Size) -> dict[str, Callable[[], tuple[Any, Any, Step]]]:
    """Returns the functions that make each step, by name."""
    adamw = functools.partial(optax.adamw, 1e-3)
    return {
        BY_HAND: lambda: by_hand(size, adamw()),
        IF_FINITE: lambda: by_hand(size, optax.apply_if_finite(adamw(), 5)),
        NO_SKIPPING: lambda: ours(size, skip_nonfinite=False),
        OURS: lambda: ours(size),
        IN_BFLOAT16: lambda: ours(size, "bfloat16", master_weights="remainder"),
    }


def rows(small: bool = False) -> Iterator[Row]:
    """Yields every row, as it is measured. The small ones have no bounds: fixed costs of kernels
    dominate them.
    """
    size = SMALL if small else Size()
    made = steps(size)
    hand = figures(size, made[BY_HAND]())
    for name, (cycles, temporary) in BOUNDS.items():
        if small and name not in (OURS, IN_BFLOAT16):
            continue
        found, label = figures(size, made[name]()), f"{name}, {size.target}"
        yield Row("cycles", label, found.cycles, hand.cycles, None if small else cycles)
        yield Row("temp", label, found.temporary, hand.temporary, None if small else temporary)
        yield Row(
            "exchanged", label, sum(found.collectives.values()), sum(hand.collectives.values())
        )


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "by hand"))

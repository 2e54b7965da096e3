"""Whole train steps as shapes: what the examples of this folder share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from policy import (
    apply_gradients,
    current_policy,
    loss_scale_of,
    mixed_precision,
    state_shardings,
    value_and_grad,
)
from policy.optim import MixedPrecision
from policy.optim.storage_modes import MasterWeights

SpecOf = Callable[[tuple[int, ...]], PartitionSpec]
# loss_fn(params, batch_stats, batch) -> (loss, batch_stats); a model without statistics has ().
LossFn = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def adamw(
    master_weights: MasterWeights = "auto", moment_dtype: str | None = None
) -> MixedPrecision:
    """Makes AdamW under the policy in force.

    Args:
      master_weights: the storage mode of `mixed_precision`.
      moment_dtype: of both moments; None for float32.
    """
    is_random = moment_dtype is not None or master_weights == "stochastic"
    return mixed_precision(
        optax.adamw(3e-4),
        current_policy() or "float32",
        master_weights=cast(Any, master_weights),
        moment_dtype=None if moment_dtype is None else {"mu": moment_dtype, "nu": moment_dtype},
        key=jax.random.key(0) if is_random else None,
    )


def train_step(
    loss_fn: LossFn,
    tx: MixedPrecision,
    params: Any,
    batch_stats: Any,
    batch: Any,
    mesh: Mesh | None,
    spec_of: SpecOf = lambda shape: PartitionSpec(),
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted step, and the shapes that it is called with: params, state, statistics and
    a batch.

    Args:
      params, batch_stats, batch: trees of shapes.
      mesh: the devices; of one device, or None, nothing is sharded. The batch is split over all of
        its axes.
      spec_of: returns the spec of a param from its shape; each moment lies beside its param.
    """

    def step(params: Any, opt_state: Any, batch_stats: Any, batch: Any) -> Any:
        gradients = value_and_grad(
            loss_fn, has_aux=True, loss_scale=loss_scale_of(opt_state), grads="compute"
        )
        (loss, batch_stats), grads = gradients(params, batch_stats, batch)
        params, opt_state, _ = apply_gradients(tx, params, opt_state, grads)
        return params, opt_state, batch_stats, loss

    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    if mesh is None or mesh.size == 1:
        return jitted, (params, jax.eval_shape(tx.init, params), batch_stats, batch)
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    params = jax.tree.map(lambda x: placed(x, NamedSharding(mesh, spec_of(x.shape))), params)
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params), state_shardings(tx, params))
    batch_stats = jax.tree.map(lambda x: placed(x, whole), batch_stats)
    return jitted, (params, state, batch_stats, jax.tree.map(lambda x: placed(x, rows), batch))


def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def devices_of(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.size


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def counts_of(args: tuple[Any, ...]) -> dict[str, int]:
    """Returns the number of params of a step's arguments, and the bytes of the batch."""
    params = sum(math.prod(x.shape) for x in jax.tree.leaves(args[0]))
    batch = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(args[3]))
    return {"params": params, "batch": batch}

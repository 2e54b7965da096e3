"""Shardings of an optimizer's state: each leaf has that of the param that it belongs to."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import KeyPath

from policy.core.arrays import path_name
from policy.optim.blockwise import BLOCK, scales_shape
from policy.optim.checks import require_transform


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the sharding of every leaf of `tx.init(params)`: its param's, or replicated.

    A leaf belongs to a param if its path ends in the param's and its shape is the param's: moments,
    masters, remainders, Kahan errors. One with more axes in front, such as a history of gradients,
    has those on every device. The scales of 8-bit moments lie as these do, but on every device of
    the last axis where that is not sharded into whole blocks of 128. All others (counts, the loss
    scale, a factored second moment's rows and columns) are replicated. For `jax.shard_map`, the
    specs are ``jax.tree.map(lambda sharding: sharding.spec, state_shardings(tx, params))``.

    Args:
      tx: `mixed_precision`'s, or any optax transform.
      params: a tree of arrays, or of `jax.ShapeDtypeStruct` with a sharding. Nothing is computed.

    Returns:
      A tree like the state, of shardings.

    Raises:
      TypeError: `tx` is no transform.
      ValueError: a param has no sharding, or one that is neither a NamedSharding nor a single
        device's.

    Example:

      >>> import jax, jax.numpy as jnp, optax
      >>> from policy import mixed_precision
      >>> from policy.optim import state_shardings
      >>> tx = mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> rows = jax.NamedSharding(mesh, jax.P("data"))
      >>> params = {"w": jax.device_put(jnp.ones((8, 2)), rows)}
      >>> shardings = state_shardings(tx, params)
      >>> opt_state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> opt_state.inner[0].mu["w"].sharding == rows
      True
    """
    require_transform(tx, "state_shardings(tx, params)")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {path: (leaf.shape, _sharding(path, leaf)) for path, leaf in leaves}
    first = next((sharding for _, sharding in known.values()), None)  # None leaves it to JAX
    is_named = isinstance(first, NamedSharding)
    everywhere = NamedSharding(first.mesh, PartitionSpec()) if is_named else first

    def one(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Sharding | None:
        for start in range(len(path) + 1):  # the longest end of the path that is a param's
            if path[start:] in known:
                shape, sharding = known[path[start:]]
                more = len(leaf.shape) - len(shape)
                if more >= 0 and leaf.shape[more:] == shape:
                    return _with_more_axes(sharding, more)
                is_scales = any(getattr(key, "name", None) == "moment_scales" for key in path)
                if is_scales and shape and leaf.shape[more:] == scales_shape(shape):
                    return _with_more_axes(_of_scales(sharding, shape), more)
                return everywhere
        return everywhere

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(tx.init, params))


def _sharding(path: KeyPath, leaf: Any) -> Sharding:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise ValueError(
            f"Each param should have a NamedSharding, or lie on a single device, but "
            f"{path_name(path)} has {sharding}: put it there with jax.device_put, or give its "
            "jax.ShapeDtypeStruct a sharding."
        )
    return sharding


def _of_scales(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Returns the sharding of the scales of a moment's blocks, from that of its codes."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < len(shape):
        return sharding
    *leading, last = sharding.spec
    if last is None or not sharding.shard_shape(shape)[-1] % BLOCK:
        return sharding
    return sharding.update(spec=PartitionSpec(*leading, None))


def _with_more_axes(sharding: Sharding, more: int) -> Sharding:
    if not more or not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec(*[None] * more, *sharding.spec))

"""Shardings of an optimizer's state: each leaf's is that of the param that it belongs to."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from policy.optim.checks import is_transform
from policy.trees import path_name, shortened


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """The sharding of every leaf of `tx.init(params)`: a param's own for what has its shape, else on every device.

    ``opt_state = jax.jit(tx.init, out_shardings=state_shardings(tx, params))(params)``

    A leaf belongs to a param where its path ends in the param's: moments, masters, remainders, what Kahan's summation
    keeps. One with more axes in front, such as a history of gradients, has those on every device. What else a transform
    keeps (counts, scales, a factored second moment's rows and columns) is replicated. For `jax.shard_map`, the specs
    are ``jax.tree.map(lambda sharding: sharding.spec, state_shardings(tx, params))``.

    Args:
      tx: `mixed_precision`'s, or any optax transform.
      params: a tree of arrays, or of `jax.ShapeDtypeStruct` with a sharding. Nothing is computed.

    Returns:
      A tree like the state, of shardings.

    Raises:
      TypeError: `tx` is no transform.
      ValueError: a param says no sharding, or one that is neither a NamedSharding nor a single device's; or meshes
        differ.
    """
    if not is_transform(tx):
        raise TypeError(
            f"tx should be an optax transform, but got {type(tx).__name__}: call state_shardings(tx, params)."
        )
    known = {path: (leaf.shape, _sharding(path, leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    everywhere = _everywhere(known)

    def one(path: Any, leaf: Any) -> Any:
        for start in range(len(path) + 1):  # the longest end of the path that is a param's
            if path[start:] in known:
                shape, sharding = known[path[start:]]
                more = len(leaf.shape) - len(shape)
                return _with_more_axes(sharding, more) if more >= 0 and leaf.shape[more:] == shape else everywhere
        return everywhere

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(tx.init, params))


def _sharding(path: Any, leaf: Any) -> Sharding:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise ValueError(
            f"Each param should have a NamedSharding, or lie on a single device, but {path_name(path)} has {sharding}: "
            "put it there with jax.device_put, or give its jax.ShapeDtypeStruct a sharding."
        )
    return sharding


def _everywhere(known: dict[Any, tuple[Any, Sharding]]) -> Sharding | None:
    """The sharding of what is the same on all devices. None, which leaves it to JAX, where there are no params."""
    meshes = {s.mesh if isinstance(s, NamedSharding) else s: path_name(path) for path, (_, s) in known.items()}
    if len(meshes) > 1:
        places = [f"{name} on {place}" for place, name in meshes.items()]
        raise ValueError(f"params should lie on one mesh, but got {shortened(places)}.")
    place = next(iter(meshes), None)
    return place if place is None or isinstance(place, Sharding) else NamedSharding(place, PartitionSpec())


def _with_more_axes(sharding: Sharding, more: int) -> Sharding:
    if not more or not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec(*[None] * more, *sharding.spec))

"""The state of `mixed_precision` between steps: functions that read it, and its shardings."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from policy.core.arrays import (
    OVERWRITE_WITH_GRADIENT,
    is_overwritten,
    leaf_names,
    path_name,
    unboxed,
)
from policy.core.messages import shortened
from policy.grads.loss_scale import LossScale, note_use
from policy.optim.blockwise import BLOCK, scales_shape
from policy.optim.host_memory import with_memory_kind
from policy.optim.storage_modes import STORAGE_MODES, MasterWeights, storage_code, storage_mode


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The storage of each param when the state was made: a part of the tree's structure.

    Attributes:
      master_weights: the mode's name, or "auto".
      dtypes: the name of each param's dtype, in flattening order; None stands for any, where the
        state was made from a tree without leaves (`optax.tree_map_params` does that to learn where
        the params are).
    """

    master_weights: MasterWeights
    dtypes: tuple[str, ...] | None

    @property
    def storage(self) -> int:
        """The `storage_code` of the params, an int."""
        return storage_code(self.dtypes or (), self.master_weights)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout) or self.master_weights != other.master_weights:
            return False
        return self.dtypes is None or other.dtypes is None or self.dtypes == other.dtypes

    def __hash__(self) -> int:
        return hash(self.master_weights)  # a layout of any dtypes equals each of them


class MixedPrecisionState(NamedTuple):
    """The state of `mixed_precision`.

    Attributes:
      layout: each param's dtype when the state was made, and the mode by name. It comes first, so
        that libraries which restore a state field by field compare it first.
      inner: the wrapped transform's own state; it was made from float32 params. Moments in 8 bits
        are nodes with `qvalue`, of the moment's shape, and `scale`.
      loss_scale: the current scale. It lives here and nowhere else.
      finite: () bool, True if the last step's gradients were finite.
      skipped: () int32, steps that were skipped.
      count: () int32, steps that were applied.
      masters: a tree like the params: the array stored beside each, see `mixed_precision`, or an
        empty `optax.MaskedNode`.
      mode: () int32, the `storage_code` of the masters. A leaf, so that it is saved and restored
        with them.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import mixed_precision
      >>> from policy.optim import MixedPrecisionState
      >>> tx = mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
      >>> opt_state = tx.init({"w": jnp.ones(2)})
      >>> isinstance(opt_state, MixedPrecisionState)
      True
      >>> opt_state.count, opt_state.skipped
      (Array(0, dtype=int32), Array(0, dtype=int32))
    """

    layout: Layout
    inner: optax.OptState
    loss_scale: LossScale
    finite: jax.Array
    skipped: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    masters: Any
    mode: jax.Array


def layout_of(params: optax.Params, master_weights: MasterWeights) -> Layout:
    """Returns the layout of params without their overwritten leaves.

    Args:
      params: a tree of arrays.
      master_weights: the mode's name, or "auto".

    Raises:
      ValueError: the mode can't store a param's dtype, such as float16 in "remainder".
    """
    leaves = jax.tree.leaves(params)
    check_mode(leaf_names(params), [leaf.dtype for leaf in leaves], master_weights)
    names = tuple(np.dtype(leaf.dtype).name for leaf in leaves)
    return Layout(master_weights, names or None)


def check_mode(names: list[str], dtypes: list[DTypeLike], master_weights: MasterWeights) -> None:
    wrong = [
        f"{name} is {np.dtype(dtype).name}"
        for name, dtype in zip(names, dtypes, strict=True)
        if np.dtype(dtype).itemsize < 4
        and np.dtype(dtype).name not in storage_mode(dtype, master_weights).param_dtypes
    ]
    if wrong:
        takes = " and ".join(STORAGE_MODES[master_weights].param_dtypes)
        raise ValueError(
            f"master_weights={master_weights!r} is for {takes} params, but {shortened(wrong)}. Use "
            "'auto', which stores a master of each half dtype, or 'full'."
        )


_OVERWRITTEN = (
    jax.tree_util.DictKey(OVERWRITE_WITH_GRADIENT),
    jax.tree_util.GetAttrKey(OVERWRITE_WITH_GRADIENT),
)


def has_overwritten(tree: Any) -> bool:
    """Returns whether a leaf of `tree` lies under `_overwrite_with_gradient`."""
    in_mapping, in_object = _OVERWRITTEN
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return bool([path for path in paths if in_mapping in path or in_object in path])


def without_overwritten(tree: Any) -> Any:
    """Returns `tree` with an empty node for each leaf under `_overwrite_with_gradient`.

    No optimizer steps those.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if is_overwritten(path) else leaf, tree
    )


def with_overwritten(
    result: optax.Params, params: Any, gradients: Any, finite: jax.Array, as_updates: bool
) -> optax.Params:
    """Fills the empty nodes of a step's result: a leaf's gradient is its new value.

    Args:
      result: new params, or with `as_updates` the differences to them.
      params: the params before.
      gradients: their gradients, unscaled there.
      finite: () bool; where it is False, the leaves stay.
      as_updates: see `result`.
    """
    if isinstance(params, optax.LookaheadParams):
        gradients = type(params)(gradients, gradients)

    def one(path: jax.tree_util.KeyPath, p: jax.Array, g: jax.Array, r: jax.Array) -> jax.Array:
        if not is_overwritten(path):
            return r
        new, same = (g - p, jnp.zeros_like(p)) if as_updates else (g, p)
        return jnp.where(finite, new, same)

    return jax.tree_util.tree_map_with_path(one, params, gradients, result)


def loss_scale_of(opt_state: Any) -> LossScale:
    """Returns the current loss scale in an optimizer state, for `value_and_grad`.

    Args:
      opt_state: a `MixedPrecisionState`, a tree that holds one (`nnx.Optimizer`'s), or an object
        with one as its attribute `opt_state` (a `TrainState`).

    Raises:
      ValueError: it holds none, or several.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import loss_scale_of, mixed_precision
      >>> tx = mixed_precision(optax.adam(1e-3), "mixed_float16", loss_scale=1024.0)
      >>> opt_state = tx.init({"w": jnp.ones(2)})
      >>> loss_scale_of(opt_state).loss_scale
      1024.0
    """
    note_use()
    return unboxed(find_state(opt_state).loss_scale)


def finite_of(opt_state: Any) -> jax.Array:
    """Returns a () bool: True if the last step's gradients were finite, so that it was applied.

    True before the first step. Gate state that a skipped step must not touch with `select_tree`.

    Args:
      opt_state: see `loss_scale_of`.

    Raises:
      ValueError: it holds no `MixedPrecisionState`, or several.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy import apply_gradients, mixed_precision
      >>> from policy import finite_of
      >>> tx = mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
      >>> params = {"w": jnp.ones(2)}
      >>> grads = {"w": jnp.array([1.0, jnp.inf])}
      >>> params, opt_state, finite = apply_gradients(tx, params, tx.init(params), grads)
      >>> finite_of(opt_state)
      Array(False, dtype=bool)
      >>> params["w"]  # the step was skipped
      Array([1., 1.], dtype=float32)
    """
    return unboxed(find_state(opt_state).finite)


def find_state(opt_state: Any) -> MixedPrecisionState:
    """Returns the one MixedPrecisionState in a tree.

    Raises:
      ValueError: there is none, or are several.
    """
    opt_state = getattr(opt_state, "opt_state", opt_state)
    found = states_in(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"opt_state should hold one MixedPrecisionState, but got {type(opt_state).__name__} "
            f"with {len(found)}: make it with mixed_precision(tx, policy).init(params)."
        )
    return found[0]


def require_state(state: Any, call: str) -> None:
    """Rejects values that are no MixedPrecisionState.

    Args:
      state: the value.
      call: the right call, for the message.

    Raises:
      TypeError: by the value's type.
    """
    if not isinstance(state, MixedPrecisionState):
        raise TypeError(
            f"state should be a MixedPrecisionState, but got {type(state).__name__}: call {call}. "
            "tx.init(params) makes one, if tx is a mixed_precision transform; a TrainState or an "
            "nnx.Optimizer holds one as its opt_state."
        )


def require_transform(tx: Any, call: str) -> None:
    """Rejects values that are no optax gradient transformation.

    Args:
      tx: the value.
      call: the right call, for the message.

    Raises:
      TypeError: it has not the methods of one.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"tx should be an optax transform, but got {type(tx).__name__}: call {call}."
        )


def states_in(tree: Any) -> list[MixedPrecisionState]:
    """Returns every MixedPrecisionState in a tree, outermost ones only."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, MixedPrecisionState))
    return [leaf for leaf in leaves if isinstance(leaf, MixedPrecisionState)]


def strong_copy(x: ArrayLike) -> jax.Array:
    """Returns a copy of an array in a dtype that is not weak.

    The first update would change a weak type. A buffer that is a param and a state leaf can't be
    donated, and an argument's buffer isn't ours to donate.
    """
    return jnp.array(x, dtype=jnp.result_type(x), copy=True)


def strongly_typed(tree: Any) -> Any:
    """Returns a state's leaves in dtypes that are not weak, without copies of those that are so.

    Python numbers, which `optax.tree_utils.tree_set` puts in from outside, have none.
    """

    def one(leaf: Any) -> jax.Array:
        if isinstance(leaf, (float, int)):
            is_float = isinstance(leaf, float)
            return jnp.asarray(leaf, jnp.float32 if is_float else jnp.result_type(type(leaf)))
        return lax.convert_element_type(leaf, leaf.dtype) if jax.typeof(leaf).weak_type else leaf

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([one(x) if getattr(x, "weak_type", True) else x for x in leaves])


def owned(leaf: ArrayLike, seen: set[int]) -> jax.Array:
    """Returns a state leaf that is strongly typed and shares its buffer with no leaf in `seen`.

    Args:
      leaf: a leaf as an `init` made it.
      seen: identities of params and of leaves before; that of `leaf` is added.
    """
    if not isinstance(leaf, jax.Array) or jax.typeof(leaf).weak_type or id(leaf) in seen:
        return strong_copy(leaf)
    seen.add(id(leaf))
    return leaf


def like_before(new: Any, old: Any) -> Any:
    """Returns the leaves of `new` in the dtypes of `old`; keys and other extended dtypes as they
    are.
    """

    def one(x: Any, before: jax.Array) -> Any:
        is_extended = jnp.issubdtype(before.dtype, jax.dtypes.extended)
        return x if is_extended else lax.convert_element_type(x, before.dtype)

    leaves, structure = jax.tree.flatten(new)
    pairs = zip(leaves, jax.tree.leaves(old), strict=True)
    return structure.unflatten(
        [
            one(x, before) if getattr(x, "weak_type", True) or x.dtype != before.dtype else x
            for x, before in pairs
        ]
    )


def incremented(count: jax.Array, by: jax.Array) -> jax.Array:
    """Increments a () int32 counter where a () bool is True; it stays at the largest integer.

    Optax's counters saturate too: one that wrapped around would go on below 0.
    """
    room = count < np.iinfo(np.int32).max
    return count + (room & by).astype(jnp.int32)


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the sharding of every leaf of `tx.init(params)`: its param's, or replicated.

    A leaf belongs to a param if its path ends in the param's and its shape is the param's: moments,
    masters, remainders. One with more axes in front, such as a history of gradients,
    has those on every device. The scales of codes lie as the codes do, but on every device of
    the last axis where that is not sharded into whole blocks of 128. All others (counts, the loss
    scale, a factored second moment's rows and columns) are replicated. For `jax.shard_map`, the
    specs are ``jax.tree.map(lambda sharding: sharding.spec, state_shardings(tx, params))``. Under
    `state_memory_kind` the shardings of arrays are of that memory.

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
      >>> from policy import state_shardings
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

    kind = getattr(tx, "state_memory_kind", None)

    def one(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Sharding | None:
        return with_memory_kind(on_devices(path, leaf.shape), kind, leaf)

    def on_devices(path: KeyPath, shape: tuple[int, ...]) -> Sharding | None:
        whole = tuple([key for key in path if key not in _PARTS])  # of a moment in 8 bits
        ends = [each[start:] for each in (path, whole) for start in range(len(each) + 1)]
        found = next((known[end] for end in ends if end in known), None)  # the longest end
        if found is None:
            return everywhere
        (of_param, sharding), more = found, len(shape) - len(found[0])
        if more >= 0 and shape[more:] == of_param:
            return _with_more_axes(sharding, more)
        is_scale = _PARTS[1] in path and more >= 0 and bool(of_param)
        if is_scale and shape[more:] == scales_shape(of_param):
            return _with_more_axes(_of_scales(sharding, of_param), more)
        return everywhere

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(tx.init, params))


_PARTS = (jax.tree_util.GetAttrKey("qvalue"), jax.tree_util.GetAttrKey("scale"))


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

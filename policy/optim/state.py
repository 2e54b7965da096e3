"""The state of `mixed_precision` between steps, and functions that find it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from policy.grads.loss_scale import LossScale
from policy.optim.storage import MasterWeights, storage_code
from policy.trees import unboxed


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The storage of each param when the state was made. It has no leaves: it lives in the tree's structure.

    Attributes:
      master_weights: the mode.
      dtypes: the name of each param's dtype, in flattening order; None stands for any, where the state was made
        from a tree without leaves (`optax.tree_map_params` does that to learn where the params are).
      optimizer: the inner transform, by the names of the functions that make its state.
    """

    master_weights: MasterWeights
    dtypes: tuple[str, ...] | None
    optimizer: str

    @property
    def storage(self) -> int:
        """The `storage_code` of the params."""
        return storage_code(self.dtypes or (), self.master_weights)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout) or self._named() != other._named():
            return False
        return self.dtypes is None or other.dtypes is None or self.dtypes == other.dtypes

    def __hash__(self) -> int:
        return hash(self._named())  # nothing of dtypes: a layout of any dtypes equals each of them

    def _named(self) -> tuple[str, str]:
        return self.master_weights, self.optimizer


class MixedPrecisionState(NamedTuple):
    """The state of `mixed_precision`.

    Attributes:
      layout: each param's dtype when the state was made, the mode by name, and the inner transform's name. It comes
        first, so that what restores a state field by field compares it first.
      inner: the wrapped transform's own state; it was made from float32 params.
      loss_scale: the current scale. It lives here and nowhere else.
      finite: () bool, whether the last step's gradients were finite.
      skipped: () int32, steps left out because they weren't.
      count: () int32, steps applied.
      masters: a tree like the params: what `policy.optim.storage` keeps beside each, else an empty `optax.MaskedNode`.
      mode: () int32, the `storage_code` of the masters. A leaf, so that it is saved and restored with them.
    """

    layout: Layout
    inner: optax.OptState
    loss_scale: LossScale
    finite: jax.Array
    skipped: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    masters: Any
    mode: jax.Array


def loss_scale_of(opt_state: Any) -> LossScale:
    """The current loss scale in an optimizer state, for `value_and_grad`.

    Args:
      opt_state: a `MixedPrecisionState`, a tree that holds one (`nnx.Optimizer`'s), or what has one
        as its attribute `opt_state` (a `TrainState`).

    Raises:
      ValueError: it holds none, or several.
    """
    return unboxed(find_state(opt_state).loss_scale)


def finite_of(opt_state: Any) -> jax.Array:
    """() bool: whether the last step's gradients were finite, so that it was applied. True before the first step.

    Takes and raises what `loss_scale_of` does. Gate what a skipped step must not touch with `select_tree`.
    """
    return unboxed(find_state(opt_state).finite)


def find_state(opt_state: Any) -> MixedPrecisionState:
    """The one MixedPrecisionState in a tree. Raises ValueError where there is none, or are several."""
    opt_state = getattr(opt_state, "opt_state", opt_state)
    found = states_in(opt_state)
    if len(found) != 1:
        raise ValueError(
            f"opt_state should hold one MixedPrecisionState, but got {type(opt_state).__name__} with {len(found)}: "
            "make it with the init of mixed_precision(tx, policy)."
        )
    return found[0]


def states_in(tree: Any) -> list[MixedPrecisionState]:
    """Every MixedPrecisionState in a tree, outermost ones only."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, MixedPrecisionState))
    return [leaf for leaf in leaves if isinstance(leaf, MixedPrecisionState)]


def strong(x: Any) -> Any:
    """An array of its own with a dtype of its own: no weak type that the first update would change, no shared buffer.

    A buffer that is both a param and a state leaf can't be donated, and what a caller passed in isn't ours to donate.
    """
    return jnp.array(x, dtype=jnp.result_type(x), copy=True)


def strengthened(leaf: Any) -> Any:
    """A state leaf with a dtype of its own: a Python number that was set from outside, as `tree_set` does, has none."""
    if isinstance(leaf, (float, int)):
        return jnp.asarray(leaf, jnp.float32 if isinstance(leaf, float) else jnp.result_type(type(leaf)))
    return lax.convert_element_type(leaf, leaf.dtype) if jax.typeof(leaf).weak_type else leaf

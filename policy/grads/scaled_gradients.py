"""`ScaledGradients`: gradients of a scaled loss, with their scale.

A plain tree of gradients is unscaled. Scaled gradients have another type, which only
`mixed_precision`'s optimizers take. So gradients can't be unscaled twice, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.core.arrays import OVERWRITE_WITH_GRADIENT


@jax.tree_util.register_pytree_with_keys_class
class ScaledGradients:
    """Gradients of a scaled loss, with their scale.

    `apply_gradients`, and `update` of `mixed_precision`, divide them by the scale, once. Other
    optimizers refuse them: the type is a pytree node of its own, so its structure differs from a
    parameter tree's. The scale is sealed: its bits are the data of a PRNG key, so that arithmetic
    mapped over the leaves, a sum over devices included, raises instead of changing it.

    Under a `flax.training.train_state.TrainState` a tree with the collection
    `_overwrite_with_gradient` may be indexed.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> grads = policy.ScaledGradients({"w": jnp.array([8.0])}, 4.0)
    >>> grads.scale
    Array(4., dtype=float32)
    >>> grads * 2
    Traceback (most recent call last):
        ...
    TypeError: unsupported operand type(s) for *: 'ScaledGradients' and 'int'

    Args:
      tree: the scaled gradients, in any floating dtype.
      scale: () float32, positive.

    Raises:
      ValueError: `scale` is not a scalar, or is concrete and not positive and finite.
    """

    __slots__ = ("_sealed_scale", "_tree")

    def __init__(self, tree: Any, scale: ArrayLike):
        require_positive(scale)
        if jnp.ndim(scale):
            raise ValueError(f"scale should be a scalar, but got shape {jnp.shape(scale)}.")
        self._tree = tree
        bits = lax.bitcast_convert_type(jnp.asarray(scale, jnp.float32), jnp.uint32)
        # of this kind of key, whose data are two words
        self._sealed_scale = jax.random.wrap_key_data(
            jnp.broadcast_to(bits, (2,)), impl="threefry2x32"
        )

    @property
    def tree(self) -> Any:
        """The gradients, scaled."""
        return self._tree

    @property
    def scale(self) -> jax.Array:
        """The () float32 factor that the gradients were multiplied by."""
        bits = jax.random.key_data(self._sealed_scale)[..., 0]
        return lax.bitcast_convert_type(bits, jnp.float32)

    def with_tree(self, tree: Any) -> ScaledGradients:
        """Returns another tree of gradients with this scale."""
        return ScaledGradients.tree_unflatten(None, (tree, self._sealed_scale))

    def tree_flatten_with_keys(self):
        keys = jax.tree_util.GetAttrKey("tree"), jax.tree_util.GetAttrKey("scale")
        return tuple(zip(keys, (self._tree, self._sealed_scale), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> ScaledGradients:
        made = object.__new__(cls)
        made._tree, made._sealed_scale = children
        return made

    def __contains__(self, key: object) -> bool:
        return isinstance(self._tree, Mapping) and key in self._tree

    def __getitem__(self, key: Any) -> Any:
        """Returns the part of the tree under `key`, still scaled.

        The overwritten collection of fp8 is returned as it is, since it is not scaled.

        Raises:
          TypeError: the tree has no overwritten collection, so that Flax has no reason to look
            inside.
        """
        if OVERWRITE_WITH_GRADIENT not in self:
            raise TypeError(
                f"ScaledGradients have no items, but got [{key!r}]: they are still multiplied by "
                "the loss scale. Hand them whole to apply_gradients(tx, params, opt_state, grads). "
                "For a plain tree of unscaled gradients, leave out grads='compute'."
            )
        part = self._tree[key]
        return part if key == OVERWRITE_WITH_GRADIENT else self.with_tree(part)

    def __repr__(self) -> str:
        return f"ScaledGradients({self._tree!r})"


def require_positive(scale: Any) -> jax.Array | Literal[True]:
    """Raises if a concrete scale is not positive and finite in float32.

    Returns:
      True; for a traced scale, a () bool with the answer at run time.

    Raises:
      ValueError: a concrete scale is not positive and finite.
    """
    if isinstance(scale, Tracer):
        return (scale > 0) & jnp.isfinite(scale.astype(jnp.float32))
    # a Python number above float32's largest becomes inf, and is refused as such
    with np.errstate(over="ignore"):
        values = np.asarray(scale).astype(np.float32)
    if not (np.all(values > 0) and np.all(np.isfinite(values))):
        raise ValueError(f"loss_scale should be positive and finite, but got {scale}.")
    return True

"""Gradients of a scaled loss: their type, scaling and unscaling, and signs of a forgotten scale.

A plain tree of gradients is unscaled. Scaled gradients have another type, `ScaledGradients`, which
only `mixed_precision`'s optimizers take. So gradients can't be unscaled twice, or not at all.

A plain tree carries no scale, so no type shows that it is scaled after all. While a step is traced,
though, it can be recorded that `loss_scale.scale(loss)` ran and `loss_scale.unscale` did not. The
arrays that `value_and_grad` returned are registered too, so that a step can detect gradients that
are swapped with the params, and those of a loss that was not scaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from policy.core.arrays import OVERWRITE_WITH_GRADIENT, is_inexact, working_dtype
from policy.core.messages import warn_once
from policy.programs.thread import thread

T = TypeVar("T")
_ABSENT: Any = object()

# Arrays that were taken as gradients, by whether the loss was scaled; by identity, as arrays have
# no hash. An entry goes when its array does.
_Arrays: TypeAlias = weakref.WeakValueDictionary[int, Any]
_registered: dict[bool, _Arrays] = {True: _Arrays(), False: _Arrays()}


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


def scale_tree(tree: T, scale: ArrayLike) -> T:
    """Multiplies every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. A traced scale that is not positive and finite makes each floating
    leaf NaN.
    """
    _refuse_scaled(tree, "scale")
    return _in_working_dtype(jnp.multiply, tree, _checked(scale))


def unscale_tree(tree: T, scale: ArrayLike) -> T:
    """Divides every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. It divides because the reciprocal of 3 is rounded, and that of 2^127
    is subnormal, which most backends flush to zero. A traced scale that is not positive and finite
    makes each floating leaf NaN.
    """
    _refuse_scaled(tree, "unscale")
    return _in_working_dtype(jnp.divide, tree, _checked(scale))


def unscale_by_reciprocal(tree: T, scale: ArrayLike) -> T:
    """Unscales by multiplication: exact for a power of two, otherwise to within an ulp of float32.

    XLA fuses a product into each of its users, but gives a quotient its own kernel and buffer: 10
    bytes an element more in an AdamW step. There are two factors because the reciprocal of 2^127 is
    subnormal, and flushed to zero.
    """
    scale = jnp.asarray(_checked(scale), jnp.float32)
    first = jnp.where(scale > np.float32(2.0**100), np.float32(2.0**-64), np.float32(1))
    second = np.float32(1) / (scale * first)

    def one(x: Any) -> Any:
        return _in_working_dtype(jnp.multiply, _in_working_dtype(jnp.multiply, x, first), second)

    return jax.tree.map(one, tree)


def _checked(scale: ArrayLike) -> ArrayLike:
    """Returns `scale`, or NaN for a traced one that is not positive, which skips the step."""
    is_positive = require_positive(scale)
    if is_positive is True:
        return scale
    return jnp.where(is_positive, scale, jnp.full_like(scale, np.nan))


def _refuse_scaled(tree: Any, what: str) -> None:
    if isinstance(tree, ScaledGradients):
        raise TypeError(
            f"loss_scale.{what} of ScaledGradients is refused: they carry their scale, and a step "
            "divides by it once. Pass them as they are to apply_gradients(tx, params, opt_state, "
            "grads)."
        )


def _in_working_dtype(operation: Any, tree: T, scale: ArrayLike) -> T:
    """Applies an operation with `scale` to the floating leaves of a tree, in float32 or wider."""
    is_one = isinstance(scale, int) and scale == 1  # a NoOpLossScale's

    def one(x: Any) -> Any:
        if not is_inexact(x):
            return x
        x = jnp.asarray(x)
        x = x.astype(working_dtype(x.dtype))
        return x if is_one else operation(x, jnp.asarray(scale, x.dtype))

    return jax.tree.map(one, tree)


def note_scaled(tree: Any, scale: Any) -> None:
    """Records that a loss under differentiation (one traced floating scalar) was scaled."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) != 1 or not isinstance(leaves[0], Tracer) or leaves[0].ndim:
        return
    if jnp.issubdtype(leaves[0].dtype, jnp.floating):
        key, scales = _key(scale), thread.scaled_losses
        # numbers take no weak reference
        is_number = isinstance(key, float)
        scales[key] = None if is_number else weakref.ref(scale, lambda _: scales.pop(key, None))


def note_unscaled() -> None:
    """Records that something was unscaled.

    The scale doesn't matter, because jit gives one scale several tracers.
    """
    thread.scaled_losses.clear()


def warn_if_scaled(scale: Any) -> bool:
    """Warns if a loss was multiplied by the optimizer's `scale` without an unscaling since.

    Returns whether it was.
    """
    is_scaled = thread.scaled_losses.pop(_key(scale), _ABSENT) is not _ABSENT
    if is_scaled:
        warn_once(
            "loss_scale.scale(loss) was differentiated, and its gradients reached mixed_precision "
            "without loss_scale.unscale. A plain tree counts as unscaled gradients, so each step "
            "is too large by the factor of the loss scale. Differentiate with "
            "policy.value_and_grad(loss_fn, loss_scale=loss_scale_of(opt_state)), which takes the "
            "unscaled loss, or call loss_scale.unscale(grads) first."
        )
    return is_scaled


def _key(scale: Any) -> float | int:
    return float(scale) if isinstance(scale, (int, float, np.generic)) else id(scale)


def note_gradients(tree: T, *, were_scaled: bool) -> T:
    """Registers the arrays of a tree of gradients, and returns the tree.

    Args:
      were_scaled: whether they were computed with a loss scale.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    _registered[were_scaled].update({id(leaf): leaf for leaf in arrays})
    return tree


def were_never_scaled(gradients: Any) -> bool:
    """Returns whether all arrays of `gradients` are registered as computed without a loss scale."""
    leaves = jax.tree.leaves(gradients)
    return bool(leaves) and all(_registered[False].get(id(leaf)) is leaf for leaf in leaves)


def are_swapped(params: Any, gradients: Any) -> bool:
    """Returns whether all arrays of `params` are registered gradients, and none of `gradients`."""

    def are_registered(tree: Any) -> list[bool]:
        return [
            any(arrays.get(id(leaf)) is leaf for arrays in _registered.values())
            for leaf in jax.tree.leaves(tree)
        ]

    found = are_registered(params)
    return bool(found) and all(found) and not any(are_registered(gradients))

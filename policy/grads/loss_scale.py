"""Loss scales, with jmp's names and calls; gradients of a scaled loss, and a forgotten scale.

A loss scale keeps small float16 gradients from underflowing: the loss is multiplied by it before
the backward pass, and the gradients are divided by it afterwards (Micikevicius et al. 2018, "Mixed
Precision Training", section 3.2). A power of two, as by default, causes no rounding; other values
are accepted.

A plain tree of gradients is unscaled. Scaled gradients have another type, `ScaledGradients`, which
only `mixed_precision`'s optimizers take. So gradients can't be unscaled twice, or not at all.

A plain tree carries no scale, so no type shows that it is scaled after all. While a step is traced,
though, it can be recorded that `loss_scale.scale(loss)` ran and `loss_scale.unscale` did not. The
arrays that `value_and_grad` returned are registered too, so that a step can detect gradients that
are swapped with the params, and those of a loss that was not scaled.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from policy.core.arrays import OVERWRITE_WITH_GRADIENT, is_inexact, working_dtype
from policy.core.messages import warn_once
from policy.programs.thread import thread

T = TypeVar("T")

# --------------------------------------------------------------------------------------------------
# Loss scales: none, static and dynamic
# --------------------------------------------------------------------------------------------------

_LARGEST = float(jnp.finfo(jnp.float32).max)
_LARGEST_INT = int(jnp.iinfo(jnp.int32).max)
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # a scale that underflows to 0 would never come back


@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale without effect. A pytree without leaves.

    >>> import policy
    >>> policy.NoOpLossScale().scale(3.0)
    3.0
    """

    @property
    def loss_scale(self) -> int:
        """The scale, 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree` unchanged."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` unchanged."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> NoOpLossScale:
        """Returns this loss scale."""
        del grads_finite
        return self


class _ByNumber:
    """Scales and unscales by a number."""

    loss_scale: ArrayLike

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves of `tree`, narrow ones in float32.

        Raises:
          ValueError: the scale is concrete, and not positive and finite.
        """
        note_use()
        note_scaled(tree, self.loss_scale)
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves of `tree`; narrow ones in float32. Raises as `scale` does."""
        note_use()
        thread.scaled_losses.clear()  # of any scale: jit gives one scale several tracers
        return unscale_tree(tree, self.loss_scale)


@dataclasses.dataclass(frozen=True)
class StaticLossScale(_ByNumber):
    """Scales and unscales by a fixed number. A pytree without leaves.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> scale = policy.StaticLossScale(1024)
    >>> float(scale.scale(jnp.float16(100)))
    102400.0

    Args:
      loss_scale: a concrete number; an array is converted to a Python number. `scale` and `unscale`
        reject one that is not positive.
    """

    loss_scale: ArrayLike

    def __post_init__(self):
        if not isinstance(self.loss_scale, (int, float)):
            object.__setattr__(self, "loss_scale", _number(self.loss_scale))

    def adjust(self, grads_finite: ArrayLike) -> StaticLossScale:
        """Returns this loss scale."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_ByNumber):
    """Finds the largest scale that keeps gradients finite.

    After `period` finite steps in a row the scale is multiplied by `factor`; a non-finite step
    divides it by `factor` and restarts the count::

        finite:      counter += 1;  if counter == period: counter = 0; scale *= factor
        non-finite:  counter = 0;   scale = max(min_loss_scale, scale / factor)

    It grows on the `period`-th finite step exactly. A growth beyond `max_loss_scale`, or beyond
    float32, is skipped. With `hysteresis` h above 1 the scale falls on the h-th non-finite step
    only, and on every further one until a growth interval is completed, which restores the full
    hysteresis (as Megatron-LM's `DynamicGradScaler` does).

    The pytree's leaves are `(loss_scale, counter)`, and `hysteresis_left` if hysteresis is above 1.
    The other fields are Python numbers in the tree's structure, which survive every round trip.

    >>> import policy
    >>> scale = policy.DynamicLossScale(2.0**15, period=2)
    >>> float(scale.adjust(False).loss_scale)
    16384.0
    >>> float(scale.adjust(True).adjust(True).loss_scale)
    65536.0

    Args:
      loss_scale: () float32. Another floating value is converted; an integer is converted with a
        warning.
      counter: () int32, the finite steps since the last change.
      period: finite steps before a growth.
      factor: the factor of growth and the divisor of a fall, above 1.
      min_loss_scale: the scale never falls below it. 0 is allowed.
      max_loss_scale: the scale never grows above it.
      hysteresis: non-finite steps before the scale falls.
      hysteresis_left: () int32, the steps left of these; None starts with `hysteresis`.

    Raises:
      ValueError: the scale is not between its minimum and maximum; or these, period, factor or
        hysteresis are invalid.
      TypeError: one of them is traced.
    """

    loss_scale: ArrayLike = 2.0**15
    counter: ArrayLike = 0
    period: int = 2000
    factor: float = 2
    min_loss_scale: float = 1.0
    max_loss_scale: float = _LARGEST
    hysteresis: int = 1
    hysteresis_left: ArrayLike | None = None

    def __post_init__(self):
        _warn_if_not_floating(self.loss_scale, "loss_scale")
        _warn_if_not_floating(self.min_loss_scale, "min_loss_scale")
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("loss_scale", _strong_scalar(self.loss_scale, np.float32))
        put("counter", _strong_scalar(self.counter, np.int32))
        for name in ("period", "hysteresis"):
            put(name, _count(name, getattr(self, name)))
        for name in ("factor", "min_loss_scale", "max_loss_scale"):
            put(name, _number(getattr(self, name)))
        if not (self.factor > 1 and math.isfinite(self.factor)):
            raise ValueError(f"factor should be finite and above 1, but got {self.factor}.")
        if not 0 <= self.min_loss_scale <= self.max_loss_scale:
            raise ValueError(
                "min_loss_scale should lie between 0 and max_loss_scale, "
                f"but got min_loss_scale={self.min_loss_scale} and "
                f"max_loss_scale={self.max_loss_scale}."
            )
        if not isinstance(self.loss_scale, Tracer):
            require_positive(self.loss_scale)
            largest = np.float32(min(self.max_loss_scale, _LARGEST))
            scale = np.asarray(self.loss_scale)
            if not np.all((np.float32(self.min_loss_scale) <= scale) & (scale <= largest)):
                raise ValueError(
                    f"loss_scale should lie between min_loss_scale={self.min_loss_scale} and "
                    f"max_loss_scale={self.max_loss_scale}, but got {self.loss_scale}."
                )
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        put("hysteresis_left", _strong_scalar(left, np.int32) if self.hysteresis > 1 else None)

    def adjust(self, grads_finite: ArrayLike) -> DynamicLossScale:
        """Returns the loss scale after a step.

        `grads_finite` is a () bool; leaves keep their dtypes, so a scan can carry it.

        Raises:
          ValueError: `grads_finite` is not a scalar.
        """
        finite = jnp.asarray(grads_finite)
        if finite.ndim:
            raise ValueError(
                f"grads_finite should be a boolean scalar, but got shape {finite.shape}."
            )
        finite = finite.astype(bool)
        scale = jnp.asarray(self.loss_scale, jnp.float32)
        counter = jnp.asarray(self.counter, jnp.int32) + jnp.int32(1)
        complete = counter >= self.period
        factor = np.float32(self.factor)

        largest = np.float32(min(self.max_loss_scale, _LARGEST))
        smallest = np.float32(max(self.min_loss_scale, _SMALLEST))
        grown = scale * factor
        grown = jnp.where(grown <= largest, grown, scale)
        fallen = scale / factor
        # also from a scale that is not finite, which a restored or overwritten state may hold
        fallen = jnp.where(fallen > smallest, jnp.minimum(fallen, largest), smallest)
        left = self.hysteresis_left
        if left is not None:
            left = jnp.asarray(left, jnp.int32)
            used = jnp.maximum(left - jnp.int32(1), jnp.int32(0))
            fallen = jnp.where(used > 0, scale, fallen)
            filled = jnp.where(complete, jnp.int32(self.hysteresis), left)
            left = jnp.where(finite, filled, used)
        scale = jnp.where(finite, jnp.where(complete, grown, scale), fallen)
        counter = jnp.where(finite & ~complete, counter, jnp.int32(0))
        leaves = (scale, counter) if left is None else (scale, counter, left)
        return jax.tree.structure(self).unflatten(leaves)


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale

_DYNAMIC_LEAVES = ("loss_scale", "counter", "hysteresis_left")
_DYNAMIC_STATIC = ("period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis")


def _flatten(loss_scale: DynamicLossScale):
    names = _DYNAMIC_LEAVES[: 3 if loss_scale.hysteresis > 1 else 2]
    leaves = [(jax.tree_util.GetAttrKey(name), getattr(loss_scale, name)) for name in names]
    return leaves, tuple(getattr(loss_scale, name) for name in _DYNAMIC_STATIC)


def _unflatten(static: tuple[Any, ...], leaves: Any) -> DynamicLossScale:
    # past __post_init__: JAX also puts placeholders where arrays were
    made = object.__new__(DynamicLossScale)
    # None is the hysteresis_left of a scale that has two leaves
    values = zip(_DYNAMIC_STATIC + _DYNAMIC_LEAVES, (*static, *leaves, None), strict=False)
    for name, value in values:
        object.__setattr__(made, name, value)
    return made


jax.tree_util.register_pytree_with_keys(DynamicLossScale, _flatten, _unflatten)
jax.tree_util.register_static(NoOpLossScale)
jax.tree_util.register_static(StaticLossScale)


def get_loss_scale(loss_scale: LossScale | str | ArrayLike | None) -> LossScale:
    """Returns the loss scale for None, "dynamic", a positive number or a loss scale object.

    Raises:
      ValueError: another text, or a number that is not positive and finite.
      TypeError: any other value.
    """
    if loss_scale is None:
        return NoOpLossScale()
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if not isinstance(loss_scale, (NoOpLossScale, StaticLossScale, DynamicLossScale)):
        numbers = (int, float, np.number, np.ndarray, jax.Array)
        if isinstance(loss_scale, bool) or not isinstance(loss_scale, numbers):
            error = ValueError if isinstance(loss_scale, str) else TypeError
            raise error(
                "loss_scale should be None, 'dynamic', a positive number or an instance of one of "
                f"policy's loss scales, but got {loss_scale!r}."
            )
        loss_scale = StaticLossScale(loss_scale)
    require_positive(loss_scale.loss_scale)
    return loss_scale


def _strong_scalar(x: Any, dtype: DTypeLike) -> Any:
    """Returns `x` in a strong dtype: a weak one would change in the first adjustment."""
    if not isinstance(x, jax.Array):
        return np.asarray(x, dtype)
    is_strong = x.dtype == dtype and not x.weak_type
    return x if is_strong else lax.convert_element_type(x, np.dtype(dtype))


def _number(x: Any) -> float:
    return x if type(x) in (int, float) else float(np.asarray(x))


def _count(name: str, x: Any) -> int:
    value = _number(x)
    if not (1 <= value <= _LARGEST_INT and value == int(value)):
        raise ValueError(
            f"{name} should be a whole number from 1 to {_LARGEST_INT}, but got {value}."
        )
    return int(value)


def _warn_if_not_floating(x: Any, name: str) -> None:
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=4)


# --------------------------------------------------------------------------------------------------
# Gradients of a scaled loss
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class ScaledGradients:
    """Gradients of a scaled loss, with their scale.

    `apply_gradients`, and `update` of `mixed_precision`, divide them by the scale, once. Other
    optimizers reject them: the type is a pytree node of its own, so its structure differs from a
    parameter tree's. The scale is sealed: its bits are the data of a PRNG key, so that arithmetic
    mapped over the leaves, a sum over devices included, raises instead of changing it.

    Under a `flax.training.train_state.TrainState` a tree with the collection
    `_overwrite_with_gradient` may be indexed.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> grads = policy.grads.ScaledGradients({"w": jnp.array([8.0])}, 4.0)
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
        note_use()
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
    # a Python number above float32's largest becomes inf, and is rejected as such
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
    _reject_scaled(tree, "scale")
    return _in_working_dtype(jnp.multiply, tree, _checked(scale))


def unscale_tree(tree: T, scale: ArrayLike) -> T:
    """Divides every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. It divides because the reciprocal of 3 is rounded, and that of 2^127
    is subnormal, which most backends flush to zero. A traced scale that is not positive and finite
    makes each floating leaf NaN.
    """
    _reject_scaled(tree, "unscale")
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


def _reject_scaled(tree: Any, what: str) -> None:
    if isinstance(tree, ScaledGradients):
        raise TypeError(
            f"loss_scale.{what} of ScaledGradients is rejected: they carry their scale, and a step "
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


# --------------------------------------------------------------------------------------------------
# Signs of a forgotten scale
# --------------------------------------------------------------------------------------------------

_ABSENT: Any = object()

# Arrays that were taken as gradients, by whether the loss was scaled; by identity, as arrays have
# no hash. An entry goes when its array does.
_Arrays: TypeAlias = weakref.WeakValueDictionary[int, Any]
_registered: dict[bool, _Arrays] = {True: _Arrays(), False: _Arrays()}

_is_any_used = False  # whether this process read or used a loss scale


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


def note_use() -> None:
    """Records that this process read or used a loss scale."""
    global _is_any_used
    _is_any_used = True


def warn_if_forgotten(gradients: Any, scale: Any, *, carry_scale: bool) -> None:
    """Warns if the gradients that reached an optimizer with a loss scale are scaled or never were.

    A loss was multiplied by the optimizer's scale without an unscaling since; or the gradients were
    computed without one, or by a process that used none so far.

    Args:
      gradients: a tree.
      scale: the optimizer's.
      carry_scale: whether they were `ScaledGradients`, which are right in any case.
    """
    is_scaled = thread.scaled_losses.pop(_key(scale), _ABSENT) is not _ABSENT
    if carry_scale:
        return
    if is_scaled:
        warn_once(
            "loss_scale.scale(loss) was differentiated, and its gradients reached mixed_precision "
            "without loss_scale.unscale. A plain tree counts as unscaled gradients, so each step "
            "is too large by the factor of the loss scale. Differentiate with "
            "policy.value_and_grad(loss_fn, loss_scale=loss_scale_of(opt_state)), which takes the "
            "unscaled loss, or call loss_scale.unscale(grads) first."
        )
    elif were_never_scaled(gradients) or not (_is_any_used or _are_concrete(gradients)):
        warn_once(
            "mixed_precision has a loss scale, but these gradients were computed without one, so "
            "that small ones underflow in float16. Differentiate with policy.value_and_grad("
            "loss_fn, loss_scale=loss_scale_of(opt_state))."
        )


def _key(scale: Any) -> float | int:
    return float(scale) if isinstance(scale, (int, float, np.generic)) else id(scale)


def note_gradients(tree: T, *, were_scaled: bool) -> T:
    """Registers the arrays of a tree of gradients, and returns the tree.

    Args:
      were_scaled: whether they were computed with a loss scale.
    """
    if were_scaled:
        note_use()
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    _registered[were_scaled].update({id(leaf): leaf for leaf in arrays})
    return tree


def were_never_scaled(gradients: Any) -> bool:
    """Returns whether all arrays of `gradients` are registered as computed without a loss scale."""
    leaves = jax.tree.leaves(gradients)
    return bool(leaves) and all(_registered[False].get(id(leaf)) is leaf for leaf in leaves)


def _are_concrete(tree: Any) -> bool:
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def are_swapped(params: Any, gradients: Any) -> bool:
    """Returns whether all arrays of `params` are registered gradients, and none of `gradients`."""

    def are_registered(tree: Any) -> list[bool]:
        return [
            any(arrays.get(id(leaf)) is leaf for arrays in _registered.values())
            for leaf in jax.tree.leaves(tree)
        ]

    found = are_registered(params)
    return bool(found) and all(found) and not any(are_registered(gradients))

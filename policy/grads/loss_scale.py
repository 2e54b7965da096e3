"""Loss scales: none, static and dynamic, with jmp's names and calls.

A loss scale keeps small float16 gradients from underflowing: the loss is multiplied by it before
the backward pass, and the gradients are divided by it afterwards (Micikevicius et al. 2018, "Mixed
Precision Training", section 3.2). A power of two, as by default, causes no rounding; other values
are accepted.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from policy.grads.scaling import (
    note_scaled,
    note_unscaled,
    require_positive,
    scale_tree,
    unscale_tree,
)

T = TypeVar("T")

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
        note_scaled(tree, self.loss_scale)
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves of `tree`; narrow ones in float32. Raises as `scale` does."""
        note_unscaled()
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
        refuse one that is not positive.
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

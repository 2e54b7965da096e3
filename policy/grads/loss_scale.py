"""Loss scales: none, static and dynamic, with jmp's names and calls.

A loss scale keeps small float16 gradients from underflowing: the loss is multiplied by it before
the backward pass, and the gradients are divided by it afterwards (Micikevicius et al. 2018, "Mixed
Precision Training", section 3.2). A power of two, as by default, causes no rounding; other values
are accepted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from policy.core.trees import is_inexact, working_dtype
from policy.grads.scaled_losses import note_scaled, note_unscaled

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


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
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
            object.__setattr__(self, "loss_scale", _python_float("loss_scale", self.loss_scale))

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves of `tree`, narrow ones in float32.

        Raises:
          ValueError: the scale is not positive and finite.
        """
        note_scaled(tree, self.loss_scale)
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves of `tree`; narrow ones in float32. Raises as `scale` does."""
        note_unscaled()
        return unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> StaticLossScale:
        """Returns this loss scale."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
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
        put("period", _positive_int("period", self.period))
        put("hysteresis", _positive_int("hysteresis", self.hysteresis))
        put("factor", _python_float("factor", self.factor))
        put("min_loss_scale", _python_float("min_loss_scale", self.min_loss_scale))
        put("max_loss_scale", _python_float("max_loss_scale", self.max_loss_scale))
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
            _require_between(self.loss_scale, self.min_loss_scale, self.max_loss_scale)
        if self.hysteresis > 1:
            left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
            put("hysteresis_left", _strong_scalar(left, np.int32))
        else:
            put("hysteresis_left", None)

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

        grown = scale * factor
        grown = jnp.where(grown <= np.float32(min(self.max_loss_scale, _LARGEST)), grown, scale)
        smallest = np.float32(max(self.min_loss_scale, _SMALLEST))
        fallen = scale / factor
        # also from a scale that is not finite, which a restored or overwritten state may hold
        fallen = jnp.where(
            fallen > smallest,
            jnp.minimum(fallen, np.float32(min(self.max_loss_scale, _LARGEST))),
            smallest,
        )
        left = self.hysteresis_left
        if left is not None:
            left = jnp.asarray(left, jnp.int32)
            used = jnp.maximum(left - jnp.int32(1), jnp.int32(0))
            fallen = jnp.where(used > 0, scale, fallen)
            filled = jnp.where(complete, jnp.int32(self.hysteresis), left)
            left = jnp.where(finite, filled, used)
        return _replace_leaves(
            self,
            jnp.where(finite, jnp.where(complete, grown, scale), fallen),
            jnp.where(finite & ~complete, counter, jnp.int32(0)),
            left,
        )


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale

_DYNAMIC_LEAVES = ("loss_scale", "counter", "hysteresis_left")
_DYNAMIC_STATIC = ("period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis")


def _replace_leaves(loss_scale: DynamicLossScale, *leaves: Any) -> DynamicLossScale:
    return _unflatten(_flatten(loss_scale)[1], leaves)


def _flatten(loss_scale: DynamicLossScale):
    names = _DYNAMIC_LEAVES[: 3 if loss_scale.hysteresis > 1 else 2]
    leaves = [(jax.tree_util.GetAttrKey(name), getattr(loss_scale, name)) for name in names]
    return leaves, tuple(getattr(loss_scale, name) for name in _DYNAMIC_STATIC)


def _unflatten(static: tuple[Any, ...], leaves: Any) -> DynamicLossScale:
    # past __post_init__: JAX also puts placeholders where arrays were
    made = object.__new__(DynamicLossScale)
    object.__setattr__(made, "hysteresis_left", None)
    for name, value in (
        *zip(_DYNAMIC_STATIC, static, strict=True),
        *zip(_DYNAMIC_LEAVES, leaves, strict=False),
    ):
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
    if isinstance(loss_scale, str):
        if loss_scale != "dynamic":
            raise ValueError(
                "loss_scale should be None, 'dynamic', a number or a loss scale, but got "
                f"{loss_scale!r}."
            )
        return DynamicLossScale()
    if isinstance(loss_scale, (bool, type)):
        made = (
            f"make an instance, {loss_scale.__name__}(...)"
            if isinstance(loss_scale, type)
            else "'dynamic' turns a dynamic one on"
        )
        raise TypeError(
            "loss_scale should be None, 'dynamic', a concrete number or a loss scale, but got "
            f"{getattr(loss_scale, '__name__', loss_scale)}: {made}."
        )
    if not hasattr(loss_scale, "adjust"):
        try:
            loss_scale = StaticLossScale(_python_float("loss_scale", loss_scale))
        except (TypeError, ValueError):
            raise TypeError(
                "loss_scale should be None, 'dynamic', a concrete number or a loss scale, "
                f"but got {type(loss_scale).__name__}."
            ) from None
    if not isinstance(loss_scale, (NoOpLossScale, StaticLossScale, DynamicLossScale)):
        raise TypeError(
            "loss_scale should be one of policy's loss scales, but got "
            f"{type(loss_scale).__module__}."
            f"{type(loss_scale).__name__}: use the class of the same name in policy."
        )
    require_positive(loss_scale.loss_scale)
    return loss_scale


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


def _checked(scale: ArrayLike) -> ArrayLike:
    """Returns `scale`, or NaN for a traced one that is not positive, which skips the step."""
    is_positive = require_positive(scale)
    return (
        scale
        if is_positive is True
        else jnp.where(is_positive, scale, jnp.full_like(scale, np.nan))
    )


def scale_tree(tree: T, scale: ArrayLike) -> T:
    """Multiplies every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. A traced scale that is not positive and finite makes each floating
    leaf NaN.
    """
    _refuse_scaled(tree, "scale")
    scale = _checked(scale)
    return jax.tree.map(lambda x: _in_working_dtype(jnp.multiply, x, scale), tree)


def unscale_tree(tree: T, scale: ArrayLike) -> T:
    """Divides every floating leaf by a positive () scale, in float32 or wider.

    Other leaves are unchanged. It divides because the reciprocal of 3 is rounded, and that of 2^127
    is subnormal, which most backends flush to zero. A traced scale that is not positive and finite
    makes each floating leaf NaN.
    """
    _refuse_scaled(tree, "unscale")
    scale = _checked(scale)
    return jax.tree.map(lambda x: _in_working_dtype(jnp.divide, x, scale), tree)


def _refuse_scaled(tree: Any, what: str) -> None:
    if getattr(type(tree), "carries_its_scale", False):
        raise TypeError(
            f"loss_scale.{what} of {type(tree).__name__} is refused: they carry their scale, and a "
            "step divides by it once. Pass them as they are to apply_gradients(tx, params, "
            "opt_state, grads)."
        )


def all_squares_finite(gradients: Any, scale: ArrayLike | None) -> jax.Array:
    """Returns a () bool: True if the square of every gradient is finite in float32 or wider.

    A gradient of 1e20 is finite but its square is not, and an infinite second moment never decays.
    Each leaf is read once, as it is stored. For scaled leaves of 16 and 32 bits the magnitudes may
    be summed instead: a leaf whose true magnitudes sum to more than 1.8e19 counts as not finite,
    too.

    Args:
      gradients: a tree of floating and complex leaves.
      scale: the divisor of the gradients before they are squared; None stands for 1.
    """
    leaves = jax.tree.leaves(gradients)
    if not leaves:
        return jnp.array(True)
    totals = lax.platform_dependent(
        leaves,
        tpu=lambda leaves: [
            _total(leaf, scale, _sum_by_matmul, (*_SUMMED, jnp.float16)) for leaf in leaves
        ],
        default=lambda leaves: [_total(leaf, scale, _sum, _SUMMED) for leaf in leaves],
    )
    totals = jnp.stack([*totals, jnp.zeros_like(totals[0])])
    if scale is not None:
        totals = jnp.square(unscale_by_reciprocal(totals, scale))
    # A sort puts NaN, and before it infinity, last. XLA fuses it into no user, as `fusion_barrier`
    # says.
    return jnp.isfinite(lax.sort(totals)[-1])


# Leaves whose sums XLA:CPU takes as they are read; float16 it would widen in memory.
_SUMMED = (jnp.bfloat16, jnp.float32)


def _total(
    x: Any, scale: ArrayLike | None, add_up: Callable[[jax.Array], jax.Array], summed: Sequence[Any]
) -> jax.Array:
    """Returns () float32 that is finite if the squares are finite.

    For scaled leaves of the dtypes `summed` it is the sum of magnitudes. No element is multiplied
    by a factor: XLA:CPU would broadcast the factor in memory.
    """
    if x.dtype not in summed:
        parts = unscale_by_reciprocal(
            [x.real, x.imag] if jnp.iscomplexobj(x) else [x], 1.0 if scale is None else scale
        )
        squares = functools.reduce(jnp.add, [jnp.square(part) for part in parts])
        return jnp.where(is_finite(squares, x.dtype), np.float32(0), np.float32(np.nan))
    if scale is not None:
        return add_up(jnp.abs(x))
    # of the magnitude: where a branch widens the gradient too, XLA:CPU would widen it once for
    # both, in memory
    squares = jnp.square(jnp.abs(x).astype(jnp.float32))
    return add_up(squares - squares)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float32))


_SMALLEST_MATMUL = 2**17
"""Elements below which a matmul costs a TPU more than a reduction."""


def _sum_by_matmul(x: jax.Array) -> jax.Array:
    """Sums along one axis by the matrix unit, which takes a third of the cycles of a reduction.

    It may round float32 to bfloat16, which preserves NaN and infinity and turns values above
    bfloat16's largest number into infinity.
    """
    # a contraction over explicit mesh axes is ambiguous
    sharded = jax.typeof(x).sharding.spec
    free = [axis for axis in range(x.ndim) if axis >= len(sharded) or sharded[axis] is None]
    if x.ndim < 2 or x.size < _SMALLEST_MATMUL or not free:
        return _sum(x)
    axis = free[-1]  # the first is the one that is split over devices, mostly: XLA would gather it
    # two rows, as XLA makes a reduction of a product with one
    ones = jnp.ones((2, x.shape[axis]), x.dtype)
    contracted = ((1,), (axis,)), ((), ())
    sums = lax.dot_general(
        ones, x, contracted, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
    return jnp.sum(sums[0])


def unscale_by_reciprocal(tree: T, scale: ArrayLike) -> T:
    """Unscales by multiplication: exact for a power of two, otherwise to within an ulp of float32.

    XLA fuses a product into each of its users, but gives a quotient its own kernel and buffer: 10
    bytes an element more in an AdamW step. There are two factors because the reciprocal of 2^127 is
    subnormal, and flushed to zero.
    """
    scale = jnp.asarray(_checked(scale), jnp.float32)
    first = jnp.where(scale > np.float32(2.0**100), np.float32(2.0**-64), np.float32(1))
    second = np.float32(1) / (scale * first)
    return jax.tree.map(
        lambda x: _in_working_dtype(
            jnp.multiply, _in_working_dtype(jnp.multiply, x, first), second
        ),
        tree,
    )


def _in_working_dtype(operation: Any, x: Any, scale: ArrayLike) -> Any:
    if not is_inexact(x):
        return x
    x = jnp.asarray(x)
    x = x.astype(working_dtype(x.dtype))
    return operation(x, jnp.asarray(scale, x.dtype))


def all_finite(tree: Any) -> jax.Array:
    """Returns a () bool: True if every floating or complex leaf of `tree` is finite.

    It is True if there is no such leaf.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.all_finite({"w": jnp.array([1.0, jnp.inf])})
    Array(False, dtype=bool)
    """
    flags = [is_finite(x, jnp.result_type(x)) for x in jax.tree.leaves(tree) if is_inexact(x)]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def is_finite(x: Any, read_as: Any) -> jax.Array:
    """Returns a () bool: True if every element of an array made from dtype `read_as` is finite.

    The sum of x - x is 0, or NaN if an element is NaN or infinite. For it XLA:CPU reads `x` once,
    whereas it writes a mask of as many bytes for `all(isfinite(x))`; but it would widen a float16
    array first. (A maximum is no test: XLA:CPU drops NaN from it. Of x · 0 it makes a product with
    zeros that it writes to memory.)
    """
    if jnp.dtype(read_as) == jnp.float16 or jnp.iscomplexobj(x):
        return jnp.all(jnp.isfinite(x))
    x = jnp.asarray(x)
    return jnp.sum(x - x) == 0


def select_tree(pred: jax.Array, a: T, b: T) -> T:
    """Returns `a` if `pred` is true, otherwise `b`.

    Protects state from skipped steps: batch statistics, an EMA.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> new, old = {"mean": jnp.float32(jnp.nan)}, {"mean": jnp.float32(1)}
    >>> policy.select_tree(policy.all_finite(new), new, old)
    {'mean': Array(1., dtype=float32)}

    Args:
      pred: () bool, as returned by `apply_gradients` and `finite_of`.
      a: a tree of arrays.
      b: a tree of the same structure, shapes and dtypes.

    Raises:
      AssertionError: `pred` is not a boolean scalar (jmp's users and its tests expect this type).
    """
    if isinstance(pred, (dict, list, tuple)):
        raise AssertionError(
            f"expected boolean scalar for pred, but got {type(pred).__name__}: call "
            "select_tree(finite, new, old)."
        )
    if jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        raise AssertionError(
            f"expected boolean scalar for pred, but got {jnp.result_type(pred)} of shape "
            f"{jnp.shape(pred)}."
        )
    pred = fusion_barrier(jnp.asarray(pred))
    return jax.tree.map(lambda x, y: lax.select(pred, jnp.asarray(x), jnp.asarray(y)), a, b)


def fusion_barrier(flag: jax.Array) -> jax.Array:
    """Returns a () bool unchanged, through an operation that XLA fuses into none of its users.

    If a flag made from every leaf selects every leaf, XLA inlines the former into each of the
    latter, and compile time is quadratic in leaves: 3.7 s for 200 leaves, 0.3 s through a sort.
    `lax.optimization_barrier` doesn't help on CPU, and `lax.cond` becomes a select itself under
    vmap.
    """
    # () -> (2,): a sort of one element, or of two equal ones, is simplified away.
    return lax.sort(jnp.stack([flag.astype(jnp.int32), jnp.int32(1)]))[0] > 0


def _strong_scalar(x: Any, dtype: DTypeLike) -> Any:
    """Returns `x` in a strong dtype: a weak one would change in the first adjustment."""
    if isinstance(x, jax.Array):
        return (
            x
            if x.dtype == dtype and not x.weak_type
            else lax.convert_element_type(x, np.dtype(dtype))
        )
    return np.asarray(x, dtype)


def _python_float(name: str, x: Any) -> float:
    if isinstance(x, str):
        raise ValueError(
            f"{name} should be a number, but got {x!r}: mixed_precision(..., loss_scale={x!r}) "
            "takes texts."
        )
    if isinstance(x, Tracer):
        raise TypeError(
            f"{name} should be a concrete number, but got the traced {x.aval}: make the loss scale "
            "outside of jit."
        )
    return (
        x
        if isinstance(x, (int, float)) and not isinstance(x, bool)
        else float(np.asarray(x).astype(np.float64))
    )


def _require_between(scale: Any, smallest: float, largest: float) -> None:
    values = np.asarray(scale)
    if not np.all(
        (np.float32(smallest) <= values) & (values <= np.float32(min(largest, _LARGEST)))
    ):
        raise ValueError(
            f"loss_scale should lie between min_loss_scale={smallest} and "
            f"max_loss_scale={largest}, but got {scale}."
        )


def _positive_int(name: str, x: Any) -> int:
    value = _python_float(name, x)
    if not (value >= 1 and value == value // 1):
        raise ValueError(f"{name} should be a whole number of at least 1, but got {value}.")
    if value > _LARGEST_INT:
        raise ValueError(
            f"{name} should be at most {_LARGEST_INT}, as its counter is an int32, but got {value}."
        )
    return operator.index(int(value))


def _warn_if_not_floating(x: Any, name: str) -> None:
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=4)

"""Flags of finite gradients, and the selection of trees by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from policy.core.arrays import is_inexact
from policy.grads.loss_scale import unscale_by_reciprocal

T = TypeVar("T")


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
    is_tree = isinstance(pred, (dict, list, tuple))
    if is_tree or jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        found = type(pred).__name__ if is_tree else f"{jnp.result_type(pred)}{jnp.shape(pred)}"
        raise AssertionError(
            f"expected boolean scalar for pred, but got {found}: "
            "call select_tree(finite, new, old)."
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

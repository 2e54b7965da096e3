"""The branches of a step: applied, or skipped, as each platform compiles the choice best."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from policy.core.arrays import varying_axes
from policy.optim.moments import is_stored_as_codes, moments_in
from policy.optim.storage_modes import Encoded, StorageMode, written_with

T = TypeVar("T")


class Operands(NamedTuple):
    """The arguments of both branches.

    Attributes:
      params: a tree of params.
      gradients: their gradients, as they were handed over.
      inner: the inner transform's state.
      masters: a tree like the params, of stored arrays.
    """

    params: optax.Params
    gradients: optax.Updates
    inner: optax.OptState
    masters: optax.Params


Results: TypeAlias = tuple[list[Encoded], optax.OptState]
"""The results of a branch: each param's, in flattening order, and the inner transform's state."""

Branch: TypeAlias = Callable[[Operands], Results]


def cond_or_select(
    flag: jax.Array, apply_step: Branch, skip_step: Branch, operands: Operands, *, tpu_selects: bool
) -> Results:
    """Computes `lax.cond` on CPUs, elsewhere a select of the results of both branches.

    XLA fuses the selects into the step, which updates each leaf in place. For a conditional,
    XLA:GPU copies params and moments once more and replicates sharded results, and XLA:TPU holds
    packed pairs beside the params. XLA:CPU would compute the step once for each result of a select,
    as XLA:TPU would for rounded params that are not packed: there `tpu_selects` is False.
    """
    # traced once for all platforms
    apply_step, skip_step = (jax.jit(step, inline=True) for step in (apply_step, skip_step))

    def select(flag: jax.Array, of: Operands) -> Results:
        return selected(flag, apply_step(of), skip_step(of))

    def cond(flag: jax.Array, of: Operands) -> Results:
        return lax.cond(flag, apply_step, skip_step, of)

    def gpu(flag: jax.Array, of: Operands) -> Results:
        if jax.tree.structure(of.gradients) != jax.tree.structure(of.params):  # lookahead's pair
            return select(flag, of)
        gradients = jax.tree.map(_row_major, of.gradients, of.params)
        return select(flag, of._replace(gradients=gradients))

    tpu = select if tpu_selects else cond
    return lax.platform_dependent(flag, operands, cpu=cond, tpu=tpu, default=gpu)


def _row_major(gradient: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the gradient of a convolution's kernel in half precision in the layout of params.

    XLA:GPU gives it one of its own, and would hold moments and unpacked params in that, too. XLA of
    older JAX would gather it where it is sharded.
    """
    if gradient.ndim < 4 or param.dtype.itemsize > 2 or jax.__version_info__ < (0, 12):
        return gradient
    return with_layout_constraint(gradient, Layout(tuple(range(gradient.ndim))))


def selected(flag: jax.Array, new: T, old: T) -> T:
    """Returns the leaves of `new` where `flag`, () bool, is True, else those of `old`."""
    return jax.tree.map(functools.partial(lax.select, flag), new, old)


def in_one_pass(
    inner: optax.OptState, encoded: list[Encoded], modes: list[StorageMode], params: optax.Params
) -> optax.OptState:
    """Returns the inner state, with the first moment of each param written with its halves.

    Of two moments, XLA for TPU fuses the second by itself; it fuses neither where both are tied.
    """
    tree, shapes = jax.tree.structure(params), [p.shape for p in jax.tree.leaves(params)]

    def is_moment(node: Any) -> bool:
        leaves, own = jax.tree.flatten(node, is_leaf=is_stored_as_codes)
        return own == tree and [jnp.shape(leaf) for leaf in leaves] == shapes

    nodes, outer = jax.tree.flatten(inner, is_leaf=is_moment)
    first = next((i for i, node in enumerate(nodes) if is_moment(node)), None)
    if first is not None:
        each = zip(moments_in(nodes[first]), encoded, modes, strict=True)
        nodes[first] = tree.unflatten(
            written_with(moment, cast(jax.Array, pair))
            if mode.is_packed and _is_like(moment, cast(jax.Array, pair))
            else moment
            for moment, pair, mode in each
        )
    return outer.unflatten(nodes)


def _is_like(moment: Any, pair: jax.Array) -> bool:
    """Returns whether a moment is float32, and split over devices as a param's pair is."""
    if is_stored_as_codes(moment):
        return False
    types = jax.typeof(moment), jax.typeof(pair)
    shardings = [getattr(one, "sharding", None) for one in types]
    is_same = shardings[0] == shardings[1] and varying_axes(moment) == varying_axes(pair)
    return is_same and moment.dtype == jnp.float32

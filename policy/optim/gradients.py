"""Gradients of a step: rejected by path, unscaled, clipped; flags and norms that devices share."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from policy.core.arrays import (
    axes_of_leaves,
    is_overwritten,
    leaf_names,
    path_name,
    varying_axes,
    working_dtype,
)
from policy.core.messages import dtype_and_shape, shortened
from policy.grads.finiteness import all_squares_finite
from policy.grads.loss_scale import are_swapped, unscale_by_reciprocal
from policy.optim.checks import differences
from policy.optim.state import require_state


def check_gradients(gradients: Any, state: Any, params: Any) -> None:
    """Rejects a call of `update` whose arguments don't belong together.

    Raises:
      TypeError: `state` is no MixedPrecisionState; or params and gradients are swapped.
      ValueError: `params` are missing; the gradients' tree or shapes are not the params', or they
        are no numbers, or differ between devices where the params don't. Each may have one axis
        more in front, of one length for all: gradients per example.
    """
    call = "apply_gradients(tx, params, opt_state, grads) or tx.update(grads, opt_state, params)"
    require_state(state, call)
    if params is None:
        raise ValueError(
            "params are needed, because the step is computed on float32 weights. Call "
            "update(gradients, state, params)."
        )
    if are_swapped(params, gradients):
        raise TypeError(
            "params and gradients are swapped: params is a ScaledGradients, as value_and_grad "
            "returns it, and gradients is not. Call apply_gradients(tx, params, opt_state, grads), "
            "or tx.update(grads, opt_state, params)."
        )
    params = differentiated(params)
    if jax.tree.structure(gradients) != jax.tree.structure(params):
        names = leaf_names(gradients), leaf_names(params)
        raise ValueError(
            "gradients should have the tree of the params. "
            f"{differences(*names, (gradients, params))} value_and_grad "
            "returns them second: loss, grads = value_and_grad(loss_fn)(params). "
            "flax.nnx.Optimizer takes ScaledGradients apart: use mpmodules.nnx.Optimizer for them."
        )
    pairs = _pairs(params, gradients)
    if not [True for _, p, g in pairs if _is_other(p, g, ())]:
        _check_agreed(pairs)
        return
    examples = examples_axis(gradients, params)
    wrong = [
        f"{path_name(path)} is {dtype_and_shape(g)} for a param of {dtype_and_shape(p)}"
        for path, p, g in pairs
        if not is_overwritten(path) and _is_other(p, g, examples)
    ]
    if wrong:
        raise ValueError(
            "gradients should be floating (complex for complex params only), of the params' "
            f"shapes, but {shortened(wrong)}."
        )
    _check_agreed(pairs)


def _is_other(param: Any, gradient: Any, examples: tuple[int, ...]) -> bool:
    """Returns whether an array is no gradient of a param, with the axis of examples in front."""
    kinds = (jnp.floating, jnp.complexfloating) if jnp.iscomplexobj(param) else (jnp.floating,)
    is_number = any(map(functools.partial(jnp.issubdtype, gradient.dtype), kinds))
    return not is_number or gradient.shape != (*examples, *param.shape)


_Pairs: TypeAlias = list[tuple[KeyPath, Any, Any]]


def _check_agreed(pairs: _Pairs) -> None:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return
    wrong = [
        f"{path_name(path)} over {', '.join(sorted(map(repr, axes)))}"
        for path, p, g in pairs
        if (axes := varying_axes(g) - varying_axes(p))
    ]
    if wrong:  # such params would drift apart
        raise ValueError(
            "gradients differ between devices, but their params are the same on all: "
            f"{shortened(wrong)}. Reduce them first: all_reduce(grads, axis, dtype)."
        )


def _pairs(params: optax.Params, gradients: optax.Updates) -> _Pairs:
    """Returns the path, the param and the gradient of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        (path, p, g if hasattr(g, "dtype") else jnp.asarray(g))
        for (path, p), g in zip(leaves, jax.tree.leaves(gradients), strict=True)
    ]


def examples_axis(gradients: optax.Updates, params: Any) -> tuple[int, ...]:
    """Returns the axis that every gradient has in front of its param's axes, or no axis.

    Gradients per example have it, as `optax.contrib.dpsgd` takes them.
    """
    pairs = _pairs(differentiated(params), gradients)
    shapes = [(g.shape, p.shape) for path, p, g in pairs if not is_overwritten(path)]
    lengths = {g[0] if g and g[1:] == p else -1 for g, p in shapes}
    return tuple(lengths) if len(lengths) == 1 and -1 not in lengths else ()


def checked(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transform so that each result is checked with `check_stepped`."""

    def update(
        updates: Any, state: optax.OptState, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        new, after = inner.update(updates, state, params, **extra_args)
        check_stepped(updates, new, params, after, state)
        return new, after

    return optax.GradientTransformationExtraArgs(inner.init, update)


def check_stepped(
    gradients: optax.Updates,
    updates: optax.Updates,
    wide: optax.Params,
    new_inner: optax.OptState,
    inner: optax.OptState,
) -> None:
    """Rejects results of an inner transform that have other trees or shapes than its arguments.

    Args:
      gradients: the gradients that it was given.
      updates: the updates that it returned.
      wide: the float32 params that it was given.
      new_inner: the state that it returned.
      inner: the state that it was given.

    Raises:
      ValueError: they differ.
    """
    for name, new, old in (("updates", updates, wide), ("state", new_inner, inner)):
        (leaves, tree), (before, same_tree) = jax.tree.flatten(new), jax.tree.flatten(old)
        if tree == same_tree and list(map(jnp.shape, leaves)) == list(map(jnp.shape, before)):
            continue
        found, expected = _shapes(new), _shapes(old)
        if found == expected:  # of other containers
            continue
        hint = (
            " It does not take gradients per example: average them over their first axis, or put "
            "optax.contrib.dpsgd or differentially_private_aggregate first."
        )
        raise ValueError(
            f"tx can't be wrapped: its update should return {name} of the tree and shapes that it "
            f"was given. {differences(found, expected)}"
            f"{hint if examples_axis(gradients, wide) else ''}"
        )


def _shapes(tree: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{path_name(path)}{list(jnp.shape(leaf))}" for path, leaf in leaves]


def differentiated(params: Any) -> Any:
    """Returns the params that are differentiated: all, or the fast ones of `optax.lookahead`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def gradient_norm(gradients: optax.Updates, axis_name: Sequence[Hashable] = ()) -> jax.Array:
    """Returns the norm of all leaves, () float32, the same on every device.

    Args:
      gradients: a tree of unscaled gradients, float32 or wider.
      axis_name: see `axes_of_leaves`; squares are summed over them.

    Returns:
      The norm: not finite where a gradient is not, or where squares overflow float32 (norms from
      1.8e19 on).
    """
    squares, axes_of = [], axes_of_leaves(gradients, axis_name)
    for leaf, axes in zip(jax.tree.leaves(gradients), axes_of, strict=True):
        square = jnp.sum(jnp.square(jnp.abs(leaf))).astype(jnp.float32)
        squares.append(lax.psum(square, tuple(sorted(axes, key=str))) if axes else square)
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.zeros((), jnp.float32)


def clip_to_norm(gradients: optax.Updates, norm: jax.Array, largest: float) -> optax.Updates:
    """Scales gradients down where their norm is above `largest`: g · largest / max(norm, largest).

    Args:
      gradients: a tree of unscaled gradients; dtypes stay.
      norm: their `gradient_norm`, () float32.
      largest: the largest norm that is let through.
    """
    factor = jnp.float32(largest) / jnp.maximum(norm, jnp.float32(largest))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def true_gradients(
    gradients: optax.Updates, scale: ArrayLike | None, params: optax.Params
) -> optax.Updates:
    """Returns unscaled gradients in float32, or in the dtype of a param that is wider.

    Args:
      gradients: a tree like the params, in any floating dtypes.
      scale: the scale that they carry, () float32, or None.
      params: the params that they are of.
    """
    params = differentiated(params)
    true = gradients if scale is None else unscale_by_reciprocal(gradients, scale)
    return jax.tree.map(lambda g, p: g.astype(working_dtype(p.dtype)), true, params)


def agreed(flag: jax.Array, gradients: optax.Updates, axis_name: Sequence[Hashable]) -> jax.Array:
    """Returns a () bool: True if the flag is True on every device of the gradients' mapped axes."""
    axes = frozenset().union(*axes_of_leaves(gradients, axis_name))
    if not axes:
        return flag
    return lax.pmin(flag.astype(jnp.int32), tuple(sorted(axes, key=str))) > 0


def gradients_finite(
    gradients: optax.Updates,
    scale: ArrayLike | None,
    params: optax.Params,
    axis_name: Sequence[Hashable],
) -> jax.Array:
    """Returns a () bool, the same on every device: True if all gradients' squares are finite.

    Gradients with more range than their params are checked in the dtype that they are stepped in.
    """
    like = jax.tree.leaves(differentiated(params))
    pairs = zip(jax.tree.leaves(gradients), like, strict=True)
    if any(jnp.finfo(g.dtype).maxexp > jnp.finfo(working_dtype(p.dtype)).maxexp for g, p in pairs):
        gradients, scale = true_gradients(gradients, scale, params), None
    return agreed(all_squares_finite(gradients, scale), gradients, axis_name)

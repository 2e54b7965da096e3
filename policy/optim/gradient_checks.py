"""Refusals of gradients, and of results of an inner transform, by path."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from policy.core.arrays import is_inexact, is_overwritten, leaf_names, path_name, varying_axes
from policy.core.messages import dtype_and_shape, shortened
from policy.grads.known_gradients import are_swapped
from policy.optim.checks import differences
from policy.optim.finiteness import differentiated
from policy.optim.state import require_state


def check_gradients(gradients: Any, state: Any, params: Any) -> None:
    """Refuses a call of `update` whose arguments don't belong together.

    Raises:
      TypeError: `state` is no MixedPrecisionState; or params and gradients are swapped.
      ValueError: `params` are missing; the gradients' tree or shapes are not the params', or they
        are no numbers, or differ between devices where the params don't. Each may have one axis
        more in front, of one length for all: gradients per example.
    """
    require_state(
        state,
        "apply_gradients(tx, params, opt_state, grads) or tx.update(grads, opt_state, params)",
    )
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
        raise ValueError(
            "gradients should have the tree of the params. "
            f"{differences(leaf_names(gradients), leaf_names(params))} Containers: "
            f"{type(gradients).__name__} instead of {type(params).__name__}. value_and_grad "
            "returns them second: loss, grads = value_and_grad(loss_fn)(params). "
            "flax.nnx.Optimizer takes ScaledGradients apart: use mpmodules.nnx.Optimizer for them."
        )
    _check_leaves(gradients, params)


def _check_leaves(gradients: optax.Updates, params: optax.Params) -> None:
    examples = _examples(gradients, params)
    wrong = [
        f"{path_name(path)} is {dtype_and_shape(g)} for a param of {dtype_and_shape(p)}"
        for path, p, g in _pairs(params, gradients)
        if not is_overwritten(path)
        and not (
            g.shape == (*examples, *p.shape) and is_inexact(g) and _is_complex(g) <= _is_complex(p)
        )
    ]
    if wrong:
        raise ValueError(
            "gradients should be floating (complex for complex params only), of the params' "
            f"shapes, but {shortened(wrong)}."
        )
    wrong = [
        f"{path_name(path)} over {', '.join(sorted(map(repr, axes)))}"
        for path, p, g in _pairs(params, gradients)
        if (axes := varying_axes(g) - varying_axes(p))
    ]
    if wrong:  # such params would drift apart
        raise ValueError(
            "gradients differ between devices, but their params are the same on all: "
            f"{shortened(wrong)}. Reduce them first: all_reduce(grads, axis, dtype)."
        )


def _pairs(params: optax.Params, gradients: optax.Updates) -> list[tuple[KeyPath, Any, Any]]:
    """Returns the path, the param and the gradient of each leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    pairs = zip(leaves, map(_array, jax.tree.leaves(gradients)), strict=True)
    return [(path, param, gradient) for (path, param), gradient in pairs]


def per_example(gradients: optax.Updates, params: Any) -> bool:
    """Returns whether gradients are per example, as `optax.contrib.dpsgd` takes them.

    They have one more axis in front than the params, that of the examples.
    """
    return bool(_examples(gradients, differentiated(params)))


def _examples(gradients: optax.Updates, params: optax.Params) -> tuple[int, ...]:
    """Returns the axis that every gradient has in front of its param's axes, or no axis."""
    pairs = _pairs(params, gradients)
    shapes = [(g.shape, p.shape) for path, p, g in pairs if not is_overwritten(path)]
    lengths = {g[0] if g and g[1:] == p else -1 for g, p in shapes}
    return tuple(lengths) if len(lengths) == 1 and -1 not in lengths else ()


def check_stepped(
    gradients: optax.Updates,
    updates: optax.Updates,
    wide: optax.Params,
    new_inner: optax.OptState,
    inner: optax.OptState,
) -> None:
    """Refuses results of an inner transform that have other trees or shapes than its arguments.

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
        found, expected = _shapes(new), _shapes(old)
        if found != expected:
            hint = (
                " It does not take gradients per example: average them over their first axis, or "
                "put optax.contrib.dpsgd or differentially_private_aggregate first."
            )
            raise ValueError(
                f"tx can't be wrapped: its update should return {name} of the tree and shapes that "
                f"it was given. {differences(found, expected)}"
                + (hint if per_example(gradients, wide) else "")
            )


def _shapes(tree: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{path_name(path)}{list(jnp.shape(leaf))}" for path, leaf in leaves]


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)

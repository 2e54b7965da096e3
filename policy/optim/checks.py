"""Refusals of a step, by name, before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from policy.casting import is_floating
from policy.grads.known_gradients import are_swapped
from policy.grads.value_and_grad import ScaledGradients
from policy.mapped_axes import varying_axes
from policy.optim.state import MixedPrecisionState
from policy.policy import Policy
from policy.precedence import warn_once
from policy.trees import is_inexact, is_overwritten, leaf_names, path_name, shortened


def check_params(params: Any) -> None:
    """Refuses params that no optimizer can step: by path, each of them.

    Raises:
      ValueError: a leaf is no array, is neither floating nor complex, or is an 8-bit float.
    """
    wrong = [
        f"{path_name(path)} is {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not is_overwritten(path) and not _can_step(leaf)
    ]
    if wrong:
        raise ValueError(
            f"params should be floating arrays of 16 bits or more, but {shortened(wrong)}. Keep such leaves out of "
            "the tree that is differentiated and stepped."
        )


def warn_of_wide_params(params: Any, policy: Policy) -> None:
    """Warns where the policy stores params in half precision, and each of them is wider: nobody has cast them."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    half = policy.param_dtype.itemsize < 4
    if half and dtypes and all(dtype.itemsize >= 4 for dtype in dtypes):
        warn_once(
            f"params are {', '.join(sorted(map(str, dtypes)))}, none of them {policy.param_dtype.name} as the policy "
            f"'{policy}' stores them, and an optimizer casts no params. From a float32 checkpoint, start with "
            "params, opt_state = init_from_master(tx, f32_params), which keeps what rounding drops in the masters; "
            "where float32 params are meant, say so in the policy: params=float32."
        )


def check_initial_params(params: Any) -> None:
    """Refuses params that no state can be made for, and tells of trees that hold something else than parameters.

    Raises:
      ValueError: a leaf is a shape, or a float64 of NumPy's without x64; what `check_params` refuses.
    """
    check_params(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = [path_name(path) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        raise ValueError(
            f"params should be arrays, but {shortened(shapes)} are shapes: jax.eval_shape(tx.init, params) makes the "
            "shapes of a state."
        )
    wide = [path_name(path) for path, leaf in leaves if leaf.dtype.itemsize == 8 and is_floating(leaf)]
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"params should be of dtypes that JAX has, but {shortened(wide)} is float64 of NumPy's while x64 is "
            "disabled: cast them, cast_floating(params, 'float32'), or call jax.config.update('jax_enable_x64', True)."
        )
    if not leaves and (params is None or isinstance(params, (Mapping, list, tuple))):  # optax has placeholders, too
        warnings.warn(
            "tx.init was given params without any array, so there is nothing to train: pass the params of the model, "
            "such as variables['params'].",
            stacklevel=4,
        )
    collections = sorted(_NO_PARAMETERS & set(params)) if isinstance(params, Mapping) else []
    if collections:
        warnings.warn(
            f"tx.init was given the collection {', '.join(map(repr, collections))} as params: the optimizer would step "
            "running state too (AdamW decays it). Keep it apart: tx.init(variables['params']).",
            stacklevel=4,
        )


_NO_PARAMETERS = frozenset({"batch_stats", "cache", "intermediates"})  # collections of Flax's own layers


def _can_step(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_inexact(leaf) and np.dtype(leaf.dtype).itemsize >= 2


def check_gradients(gradients: Any, state: Any, params: Any) -> None:
    """Refuses a call of `update` whose arguments don't belong together.

    Raises:
      TypeError: `state` is no MixedPrecisionState; a ScaledGradients lies inside of the gradients, or was taken apart;
        params and gradients are swapped.
      ValueError: `params` are missing; an array was donated; the gradients' tree or shapes are not the params', or they
        are no numbers, or differ between devices where the params don't. Each may have one axis more in front, of one
        length for all: gradients per example.
    """
    if not isinstance(state, MixedPrecisionState):
        holder = "" if not hasattr(state, "opt_state") else "; hand over its opt_state"
        raise TypeError(
            f"state should be a MixedPrecisionState, but got {type(state).__name__}: tx.init(params) makes one, with "
            f"the tx of mixed_precision{holder}."
        )
    if params is None:
        raise ValueError(
            "params are needed: the step is taken on float32 weights. Call update(gradients, state, params)."
        )
    _check_buffers(params=params, opt_state=state, grads=gradients)
    is_scaled = lambda node: isinstance(node, ScaledGradients)  # noqa: E731
    if any(map(is_scaled, jax.tree.leaves(gradients, is_leaf=is_scaled))):
        raise TypeError(
            "A ScaledGradients should be the whole of the gradients, but one lies inside of their tree. Hand over what "
            "value_and_grad returned, as it is."
        )
    if are_swapped(params, gradients):
        raise TypeError(
            "params are gradients that value_and_grad returned, and the gradients are none: they are swapped. Call "
            "apply_gradients(tx, params, opt_state, grads), or tx.update(grads, opt_state, params)."
        )
    params = differentiated(params)
    if jax.tree.structure(gradients) != jax.tree.structure(params):
        if isinstance(gradients, tuple) and jax.tree.structure(params) in map(jax.tree.structure, gradients):
            raise ValueError(
                f"gradients should have the tree of the params, but got a tuple of {len(gradients)} with such a tree "
                "in it. Take it out: loss, grads = value_and_grad(loss_fn)(params)."
            )
        ours, theirs = leaf_names(params), leaf_names(gradients)
        if theirs == [f"tree/{name}" for name in ours]:
            raise TypeError(
                "gradients are what lies inside of a ScaledGradients, without its scale: flax.nnx.Optimizer took it "
                "apart. Use mpmodules.nnx.Optimizer, which keeps the scale."
            )
        missing = [name for name in ours if name not in theirs]
        extra = [name for name in theirs if name not in ours]
        raise ValueError(
            "gradients should have the tree of the params. "
            f"Missing: {shortened(missing) or 'nothing'}. Beyond: {shortened(extra) or 'nothing'}. "
            f"Containers: {type(gradients).__name__} for {type(params).__name__}."
        )
    examples = _examples(gradients, params)
    wrong = [
        f"{path_name(path)} is {_shown(g)} for {_shown(p)}"
        for (path, p), g in zip(
            jax.tree_util.tree_leaves_with_path(params), map(_array, jax.tree.leaves(gradients)), strict=True
        )
        if not is_overwritten(path)
        and not (g.shape == (*examples, *p.shape) and is_inexact(g) and _is_complex(g) <= _is_complex(p))
    ]
    if wrong:
        raise ValueError(
            f"gradients should be floating (complex for complex params only), of the params' shapes, but "
            f"{shortened(wrong)}."
        )
    _check_devices(gradients, params)


def _check_buffers(**trees: Any) -> None:
    """Refuses arrays that an earlier step was given with `donate_argnums`: nothing is left of them."""
    for name, tree in trees.items():
        gone = [path_name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if _is_deleted(leaf)]
        if gone:
            raise ValueError(
                f"{name} was donated to an earlier step, and its arrays are deleted ({gone[0]}). Go on from what that "
                "step returned: params, opt_state, finite = step(params, opt_state, batch)."
            )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _check_devices(gradients: Any, params: Any) -> None:
    """Refuses gradients that differ between devices where their params are the same on all: those would drift apart."""
    wrong = [
        f"{path_name(path)} over {', '.join(sorted(map(repr, axes)))}"
        for (path, p), g in zip(
            jax.tree_util.tree_leaves_with_path(params), map(_array, jax.tree.leaves(gradients)), strict=True
        )
        if (axes := varying_axes(g) - varying_axes(p))
    ]
    if wrong:
        raise ValueError(
            f"gradients differ between devices where their params don't: {shortened(wrong)}. Reduce them first, "
            "all_reduce(grads, axis, dtype)."
        )


def differentiated(params: Any) -> Any:
    """The part of params that gradients are taken by: all, or the fast ones of `optax.lookahead`'s pair."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def per_example(gradients: Any, params: Any) -> bool:
    """Returns whether gradients have one more axis in front than the params: that of the examples, as `dpsgd` takes."""
    return bool(_examples(gradients, differentiated(params)))


def _examples(gradients: Any, params: Any) -> tuple[int, ...]:
    """The axis that every gradient has in front of its param's, or none."""
    shapes = [
        (jnp.shape(g), p.shape)
        for (path, p), g in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(gradients), strict=True)
        if not is_overwritten(path)
    ]
    lengths = {g[0] if g and g[1:] == p else -1 for g, p in shapes}
    return tuple(lengths) if len(lengths) == 1 and -1 not in lengths else ()


def check_stepped(tx: Any, gradients: Any, updates: Any, wide: Any, new_inner: Any, inner: Any) -> None:
    """Refuses what an inner transform returned where it can't be a step: other trees or shapes than it was given.

    Raises:
      ValueError: by the transform's name.
    """
    name = _name_of(tx)
    if jax.tree.structure(new_inner) != jax.tree.structure(inner):
        raise ValueError(
            f"{name} can't be wrapped: its update changed the tree of its state, "
            f"from {jax.tree.structure(inner)} to {jax.tree.structure(new_inner)}."
        )
    if jax.tree.structure(updates) != jax.tree.structure(wide):
        raise ValueError(
            f"{name} can't be wrapped: its updates should have the tree of the params, {jax.tree.structure(wide)}, "
            f"but got {jax.tree.structure(updates)}."
        )
    steps, states = _other_shapes(updates, wide), _other_shapes(new_inner, inner)
    if (steps or states) and per_example(gradients, wide):
        raise ValueError(
            f"{name} takes no gradients per example: average them over their first axis, or put optax.contrib.dpsgd or "
            f"differentially_private_aggregate first. Its updates and state: {shortened(steps + states)}."
        )
    if states:
        raise ValueError(f"{name} can't be wrapped: its update changed shapes in its state: {shortened(states)}.")
    if steps:
        raise ValueError(
            f"{name} can't be wrapped: its updates should have the params' shapes, but {shortened(steps)}."
        )


def _other_shapes(new: Any, old: Any) -> list[str]:
    return [
        f"{path_name(path)} is {_shown(a)} for {_shown(b)}"
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(jax.tree.map(_array, new)), jax.tree.leaves(old), strict=True
        )
        if a.shape != b.shape
    ]


def _name_of(tx: Any) -> str:
    """`tx (adamw)`: the function that made a transform is a part of the names of its own two."""
    made_by = getattr(tx.init, "__qualname__", "").partition(".<locals>")
    return f"tx ({made_by[0]})" if made_by[1] else "tx"


def check_number(name: str, value: Any) -> float:
    """A positive finite Python float, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value < np.inf:
        raise ValueError(f"{name} should be a positive finite number, but got {value!r}.")
    return float(value)


def is_transform(tx: Any) -> bool:
    """Returns whether `tx` has the methods of an optax gradient transformation."""
    return isinstance(tx, optax.GradientTransformation) or (
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    )


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _shown(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)

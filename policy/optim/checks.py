"""Refusals of params and of arguments, by path and name, before anything is computed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.core.casting import is_floating
from policy.core.policy import Policy
from policy.core.precedence import warn_once
from policy.core.trees import is_inexact, is_overwritten, path_name, shortened


def check_params(params: Any) -> None:
    """Refuses params that no optimizer can step, and names each of them by its path.

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
            f"params should be floating arrays of 16 bits or more, but {shortened(wrong)}. Keep "
            "such leaves out of the tree that is differentiated and updated."
        )


def warn_of_wide_params(params: optax.Params, policy: Policy) -> None:
    """Warns where the policy stores params in half precision, and nobody has cast any of them."""
    leaves = jax.tree.leaves(params)
    dtypes = {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
    half = policy.param_dtype.itemsize < 4
    if half and dtypes and all(dtype.itemsize >= 4 for dtype in dtypes):
        warn_once(
            f"params are {', '.join(sorted(map(str, dtypes)))}, but the policy '{policy}' stores "
            f"them in {policy.param_dtype.name}, and an optimizer does not cast params. From a "
            "float32 checkpoint, start with params, opt_state = init_from_master(tx, f32_params), "
            "which keeps the rounding errors in the masters. To train float32 params, give the "
            "policy params=float32."
        )


def check_initial_params(params: Any) -> None:
    """Refuses params that no state can be made for, and warns of trees of other collections.

    Raises:
      ValueError: a leaf is a shape, or a float64 of NumPy's without x64; see also `check_params`.
    """
    check_params(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = [path_name(path) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if shapes:
        raise ValueError(
            f"params should be arrays, but {shortened(shapes)} are shapes. "
            "jax.eval_shape(tx.init, params) returns the shapes of a state."
        )
    wide = [
        path_name(path) for path, leaf in leaves if leaf.dtype.itemsize == 8 and is_floating(leaf)
    ]
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"params should be of dtypes that JAX has, but {shortened(wide)} is NumPy's float64, "
            "and x64 is disabled: cast them with cast_floating(params, 'float32'), or call "
            "jax.config.update('jax_enable_x64', True)."
        )
    # optax has placeholders without arrays, too
    if not leaves and (params is None or isinstance(params, (Mapping, list, tuple))):
        warnings.warn(
            "tx.init was given params without any array, so there is nothing to train: pass the "
            "params of the model, such as variables['params'].",
            stacklevel=4,
        )
    collections = sorted(_NO_PARAMETERS & set(params)) if isinstance(params, Mapping) else []
    if collections:
        warnings.warn(
            f"tx.init was given the collection {', '.join(map(repr, collections))} as params: the "
            "optimizer would update running state too (AdamW decays it). Pass the params alone: "
            "tx.init(variables['params']).",
            stacklevel=4,
        )


# collections of Flax's own layers
_NO_PARAMETERS = frozenset({"batch_stats", "cache", "intermediates"})


def _can_step(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_inexact(leaf) and np.dtype(leaf.dtype).itemsize >= 2


def is_transform(tx: Any) -> bool:
    """Returns whether `tx` has the methods of an optax gradient transformation."""
    return isinstance(tx, optax.GradientTransformation) or (
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    )


def require_outermost(make_state: Callable[..., Any]) -> None:
    """Refuses an `init` that is called by one of optax's transforms.

    A wrapped transform can't see its wrapper, but each wrapper makes its state by calling the
    wrapped `init`. So one look at the callers, once for each state, covers every later use of it.

    Args:
      make_state: the function by which a `mixed_precision` calls its inner transform's `init`, and
        refuses another `mixed_precision` in there itself.

    Raises:
      TypeError: by the wrapper's name.
    """
    frame, name = inspect.currentframe(), None
    while frame is not None:
        if frame.f_code is make_state.__code__:
            return
        if _defines_transforms(frame.f_globals.get("__name__", "")):
            # the last one found is the outermost: partition calls masked
            name = frame.f_code.co_qualname.partition(".")[0]
        frame = frame.f_back
    if name is not None:
        raise TypeError(
            f"mixed_precision should be outermost, but is inside optax's {name}, which would see "
            "the gradients of skipped steps and change updates after they were rounded. "
            f"Put it outermost: mixed_precision(optax.{name}(...), policy)."
        )


def _defines_transforms(module: str) -> bool:
    """Returns whether a module of optax defines transforms, and not only functions on trees."""
    return module.startswith("optax.") and not module.startswith("optax.tree_utils")

"""Refusals of params and of arguments, by path and name, before anything is computed."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from policy.core.arrays import is_inexact, is_overwritten, path_name
from policy.core.messages import dtype_and_shape, shortened, warn_once
from policy.core.policy import Policy


def check_params(params: Any) -> None:
    """Refuses params that no optimizer can step, and names each of them by its path.

    Raises:
      ValueError: a leaf is no array, is neither floating nor complex, or is an 8-bit float.
    """
    wrong = [
        f"{path_name(path)} is {dtype_and_shape(leaf)} of type {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if isinstance(leaf, jax.ShapeDtypeStruct) or not (is_overwritten(path) or _can_step(leaf))
    ]
    if wrong:
        raise ValueError(
            f"params should be floating arrays of 16 bits or more, but {shortened(wrong)}. Keep "
            "integers out of the tree that is differentiated and updated. Of shapes, "
            "jax.eval_shape(tx.init, params) makes the shapes of a state."
        )


def _can_step(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and is_inexact(leaf) and leaf.dtype.itemsize >= 2


def differences(found: list[str], expected: list[str]) -> str:
    """Returns the text of the leaves that one tree has and the other has not."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    return (
        f"Missing: {shortened(missing) or 'nothing'}. Unexpected: {shortened(extra) or 'nothing'}."
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
      ValueError: see `check_params`; or a leaf is a float64 of NumPy's without x64.
    """
    check_params(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    wide = [path_name(path) for path, x in leaves if x.dtype == np.float64]
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


def require_transform(tx: Any, call: str) -> None:
    """Refuses values that are no optax gradient transformation.

    Args:
      tx: the value.
      call: the right call, for the message.

    Raises:
      TypeError: it has not the methods of one.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"tx should be an optax transform, but got {type(tx).__name__}: call {call}."
        )


def require_outermost() -> None:
    """Refuses an `init` that is called by one of optax's transforms.

    A wrapped transform can't see its wrapper, but each wrapper makes its state by calling the
    wrapped `init`. So one look at the callers, once for each state, covers every later use of it.

    Raises:
      TypeError: by the wrapper's name.
    """
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    found = [f for f in frames if _defines_transforms(f.f_globals.get("__name__", ""))]
    if found:
        # the last one is the outermost: partition calls masked
        name = found[-1].f_code.co_qualname.partition(".")[0]
        raise TypeError(
            f"mixed_precision should be outermost, but is inside optax's {name}, which would see "
            "the gradients of skipped steps and change updates after they were rounded. "
            f"Put it outermost: mixed_precision(optax.{name}(...), policy)."
        )


def _defines_transforms(module: str) -> bool:
    """Returns whether a module of optax defines transforms, and not only functions on trees."""
    return module.startswith("optax.") and not module.startswith("optax.tree_utils")

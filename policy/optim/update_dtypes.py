"""`match_updates`: the updates of a transform, cast to the dtypes that are asked for."""

from __future__ import annotations

from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from policy.core.arrays import path_name
from policy.core.messages import shortened
from policy.optim.checks import require_transform


def match_updates(
    tx: optax.GradientTransformation,
    to: Literal["grads", "params"] | DTypeLike,
    *,
    strict: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Casts the floating updates of any optax transform: to its gradients' dtypes, params', or one.

    Optax's transforms return the dtypes that their moments and the gradients promote to: Adam with
    float32 moments returns float32 updates for bfloat16 gradients, and bfloat16 ones with bfloat16
    moments. Where the dtypes agree already the program is the same as without. The state is the
    transform's own, and everything before the cast is computed as without: half-precision moments
    stay as wrong as they were. `mixed_precision` is for those.

    Args:
      tx: any optax transform.
      to: "grads", "params" (which `update` then needs) or a floating dtype for all of them.
      strict: refuses a cast that can lose something (float32 to bfloat16, float16 to bfloat16)
        instead of doing it.

    Returns:
      A transform with the state of `tx`. Updates are cast to a real dtype only where they are real.

    Raises:
      TypeError: `tx` is no transform. From `update`, with `strict`: a cast is lossy, by the paths
        of the leaves.
      ValueError: `to` is no floating dtype. From `update`: `to` is "params" and there are none.

    Example:

      >>> import jax.numpy as jnp, optax
      >>> from policy.optim import match_updates
      >>> tx = match_updates(optax.sgd(0.5), "bfloat16")
      >>> params = {"w": jnp.ones(2)}
      >>> updates, _ = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
      >>> updates["w"]
      Array([-0.5, -0.5], dtype=bfloat16)
    """
    require_transform(tx, "match_updates(tx, to)")
    is_tree = isinstance(to, str) and to in ("grads", "params")
    target: Any = to if is_tree else _floating(to)
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        like: Any = {"grads": updates, "params": params}.get(target) if is_tree else target
        if like is None:
            raise ValueError(
                "match_updates(to='params') needs params: call update(gradients, state, params)."
            )
        updates, state = inner.update(updates, state, params, **extra_args)
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        likes = tree.flatten_up_to(like) if is_tree else [like] * len(leaves)
        dtypes = [_dtype_of(x.dtype, one) for (_, x), one in zip(leaves, likes, strict=True)]
        pairs = list(zip(leaves, dtypes, strict=True))
        lossy = [
            f"{path_name(path)} from {x.dtype} to {dtype}"
            for (path, x), dtype in pairs
            if x.dtype != dtype and not _holds(dtype, x.dtype)
        ]
        if strict and lossy:
            raise TypeError(
                f"match_updates would lose digits or range: {shortened(lossy)}. Ask for a wider "
                "dtype, or leave strict out."
            )
        return tree.unflatten(x.astype(dtype) for (_, x), dtype in pairs), state

    return optax.GradientTransformationExtraArgs(inner.init, cast("Any", update))


def _floating(to: DTypeLike | None) -> np.dtype:
    try:
        dtype = None if to is None else np.dtype(jnp.dtype(to))  # numpy takes None for float64
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"to should be 'grads', 'params' or a floating dtype, but got {to!r}.")
    return dtype


def _dtype_of(source: DTypeLike, like: Any) -> Any:
    """Returns the dtype of `like`, or `source` where one of both is real and the other is not."""
    dtype = jnp.result_type(like)
    kinds = jnp.floating, jnp.complexfloating
    same_kind = any(jnp.issubdtype(source, k) and jnp.issubdtype(dtype, k) for k in kinds)
    return dtype if same_kind else source


def _holds(wide: DTypeLike, narrow: DTypeLike) -> bool:
    """Returns whether every value of one floating dtype is one of the other."""
    more, less = jnp.finfo(wide), jnp.finfo(narrow)
    return more.nmant >= less.nmant and more.maxexp >= less.maxexp and more.minexp <= less.minexp

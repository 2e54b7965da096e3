"""`match_updates`: updates in the dtype that is asked for, by name and never otherwise."""

from __future__ import annotations

from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from policy.optim.checks import is_transform
from policy.trees import path_name, shortened


def match_updates(
    tx: optax.GradientTransformation, to: Literal["grads", "params"] | DTypeLike, *, strict: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Casts the floating updates of any optax transform: to the dtypes of its gradients, of its params, or to one.

    Optax's transforms return what their moments and the gradients promote to: Adam with float32 moments returns float32
    updates for bfloat16 gradients, and bfloat16 ones with bfloat16 moments. This says which it is. Where the dtypes
    agree already the program is the same as without. The state is the transform's own, and so is what is computed
    before the cast: half-precision moments stay as wrong as they were. `mixed_precision` is for those.

    Args:
      tx: any optax transform.
      to: "grads", "params" (which `update` then needs) or a floating dtype for all of them.
      strict: refuses a cast that can lose something (float32 to bfloat16, float16 to bfloat16) instead of doing it.

    Returns:
      A transform with the state of `tx`. Updates are cast to a real dtype only where they are real.

    Raises:
      TypeError: `tx` is no transform. From `update`, with `strict`: a cast is lossy, by the paths of the leaves.
      ValueError: `to` is no floating dtype. From `update`: `to` is "params" and there are none.
    """
    if not is_transform(tx):
        raise TypeError(f"tx should be an optax transform, but got {type(tx).__name__}.")
    target = to if isinstance(to, str) and to in ("grads", "params") else _floating(to)
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        like: Any = {"grads": updates, "params": params}.get(target) if isinstance(target, str) else target
        if target == "params" and params is None:
            raise ValueError("match_updates(to='params') needs params: call update(gradients, state, params).")
        updates, state = inner.update(updates, state, params, **extra_args)
        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        dtypes = [like] * len(leaves)
        if isinstance(target, str):
            dtypes = [jnp.result_type(leaf) for leaf in tree.flatten_up_to(like)]
        if strict:
            _refuse_lossy([(path, leaf.dtype, dtype) for (path, leaf), dtype in zip(leaves, dtypes, strict=True)])
        return tree.unflatten(_cast(leaf, dtype) for (_, leaf), dtype in zip(leaves, dtypes, strict=True)), state

    return optax.GradientTransformationExtraArgs(inner.init, cast("Any", update))


def _floating(to: Any) -> np.dtype:
    try:
        dtype = None if to is None else np.dtype(jnp.dtype(to))  # numpy takes None for float64
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"to should be 'grads', 'params' or a floating dtype, but got {to!r}.")
    return dtype


def _casts(source: Any, dtype: Any) -> bool:
    both_real = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    both_complex = jnp.issubdtype(source, jnp.complexfloating) and jnp.issubdtype(dtype, jnp.complexfloating)
    return source != dtype and (both_real or both_complex)


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if _casts(x.dtype, dtype) else x


def _refuse_lossy(leaves: list[tuple[Any, Any, Any]]) -> None:
    wrong = [
        f"{path_name(path)} from {source} to {dtype}"
        for path, source, dtype in leaves
        if _casts(source, dtype) and not _holds(dtype, source)
    ]
    if wrong:
        raise TypeError(
            f"match_updates would lose digits or range: {shortened(wrong)}. Ask for a wider dtype, or leave strict out."
        )


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether every value of one floating dtype is one of the other."""
    more, less = jnp.finfo(wide), jnp.finfo(narrow)
    return more.nmant >= less.nmant and more.maxexp >= less.maxexp and more.minexp <= less.minexp

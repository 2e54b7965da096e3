"""Leaf names and tree walks that gradients and optimizers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Flax's collection of fp8 scales. Its "gradient" from `jax.grad` is its new value."""


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a tree path for messages: `encoder/layer_0/kernel`; `(root)` for a single leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def leaf_names(tree: Any) -> list[str]:
    """Returns the path of every leaf, in flattening order."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def nnx_files(value: Any) -> frozenset[str]:
    """Returns the modules of flax.nnx that define the bases of an object's class, as in
    "flax.nnx.module"; none for objects of others. `policy` imports no Flax.
    """
    names = {cls.__module__ or "" for cls in type(value).__mro__}
    return frozenset(name for name in names if f"{name}.".startswith("flax.nnx."))


def shortened(texts: list[str], limit: int = 8) -> str:
    """Returns the first `limit` texts of a list and the number of the others."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def dtype_and_shape(x: Any) -> str:
    """Returns the dtype and shape of an array for messages, or the type of another value."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def is_overwritten(path: tuple[Any, ...]) -> bool:
    """Returns whether a path contains a mapping key named `_overwrite_with_gradient`."""
    return any(
        getattr(key, "key", getattr(key, "name", None)) == OVERWRITE_WITH_GRADIENT for key in path
    )


def map_gradients(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps `function` over the leaves of `tree`, except under `_overwrite_with_gradient`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, *others: leaf if is_overwritten(path) else function(leaf, *others),
        tree,
        *rest,
    )


def unboxed(tree: Any) -> Any:
    """Returns `tree` with each box replaced by its content.

    A box is a pytree node with one child that converts to an array: an nnx Variable. `nnx.state`
    has one around each parameter, and `nnx.Optimizer` one around each leaf of its state.
    """
    return jax.tree.map(
        lambda node: _children(node)[0][0] if _is_box(node) else node, tree, is_leaf=_is_box
    )


def boxed_like(tree: Any, boxes: Any) -> Any:
    """Puts the leaves of `tree`, which is like an unboxed `boxes`, into boxes of the same kinds."""
    kinds, structure = jax.tree.flatten(boxes, is_leaf=_is_box)
    if not any(map(_is_box, kinds)):
        return tree
    contents = structure.flatten_up_to(tree)
    return structure.unflatten(
        _children(kind)[1].unflatten([content]) if _is_box(kind) else content
        for kind, content in zip(kinds, contents, strict=True)
    )


def _is_box(node: Any) -> bool:
    return hasattr(node, "__jax_array__") and len(_children(node)[0]) == 1


def _children(node: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(node, is_leaf=lambda child: child is not node)


def is_inexact(x: Any) -> bool:
    """Returns whether a leaf is floating or complex: can be differentiated and scaled."""
    return jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)


def working_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype that a leaf is updated in: float32, or its own if float64 or complex."""
    wide = (jnp.float64, jnp.complex64, jnp.complex128)
    return jnp.dtype(dtype) if dtype in wide else jnp.dtype(jnp.float32)

"""Gradients of half-precision parameters, accumulated over their uses in float32.

JAX sums the cotangents of a value in that value's dtype: a bfloat16 parameter with 64 uses gets its
64 contributions added in bfloat16. Casting the parameter up and down again once doesn't help,
because the sum is then formed before that one cast. So the loss is traced in its own dtypes, and
evaluated with each use of such a parameter reading the float32 copy through its own cast: the same
values forward, float32 sums backward.

This reaches every use in `jit`, `scan`, `cond` and `checkpoint`, and looks through data movement
(reshape, transpose, broadcast, slice, gather), so the gradient of an embedding or a bias is a
float32 sum too. It ends at custom rules: inside `custom_vjp`, `custom_jvp`, `while`, a jit with its
own shardings and other primitives with a sub-jaxpr, cotangents add up in the parameter's dtype. The
sum within one use, such as a matmul's, is the backend's: float32 accumulation, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.grads.float32_cotangents import Wide, evaluate, read
from policy.trees import is_overwritten


def widened_value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int]
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad` with aux and float32 gradients for half-precision leaves."""

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        chosen = tuple(args[position] for position in positions)
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(chosen)
        leaves = [leaf for _, leaf in with_paths]
        narrow = [not is_overwritten(path) and _is_half(leaf) for path, leaf in with_paths]
        if not any(narrow):
            return jax.value_and_grad(function, argnums, has_aux=True)(*args, **kwargs)

        def of_leaves(*leaves: Any) -> Any:
            full = list(args)
            for position, value in zip(positions, jax.tree.unflatten(treedef, leaves), strict=True):
                full[position] = value
            return function(*full, **kwargs)

        traced, rebuild = _trace(of_leaves, leaves)

        def of_wide_leaves(wide: list[Any]) -> Any:
            inputs = [
                Wide(w, leaf.dtype) if n else w
                for w, leaf, n in zip(wide, leaves, narrow, strict=True)
            ]
            return rebuild([read(x) for x in evaluate(traced, inputs)])

        wide = [
            leaf.astype(jnp.float32) if n else leaf for leaf, n in zip(leaves, narrow, strict=True)
        ]
        value, gradients = jax.value_and_grad(of_wide_leaves, has_aux=True)(wide)
        gradients = jax.tree.unflatten(treedef, gradients)
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return differentiated


def _is_half(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return (
        dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    )


def _trace(
    function: Callable[..., Any], leaves: list[Any]
) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Returns the jaxpr of `function`, and a function that rebuilds its output with non-arrays."""
    found: list[Any] = []

    def arrays_of(*leaves: Any) -> list[Any]:
        flat, treedef = jax.tree.flatten(function(*leaves))
        is_array = [
            isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)) for x in flat
        ]
        others = [None if a else x for x, a in zip(flat, is_array, strict=True)]
        found[:] = [treedef, is_array, others]
        return [x for x, a in zip(flat, is_array, strict=True) if a]

    traced = jax.make_jaxpr(arrays_of)(*leaves)

    def rebuild(arrays: list[Any]) -> Any:
        treedef, is_array, others = found
        remaining = iter(arrays)
        return jax.tree.unflatten(
            treedef, [next(remaining) if a else x for x, a in zip(others, is_array, strict=True)]
        )

    return traced, rebuild

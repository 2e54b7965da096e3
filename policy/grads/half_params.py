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

from policy.grads.differentiated_leaves import DifferentiatedLeaves
from policy.grads.float32_cotangents import Wide, evaluate, read


def widened_value_and_grad(
    function: Callable[..., Any], argnums: int | Sequence[int]
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad` with aux and float32 gradients for half-precision leaves."""

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        by = DifferentiatedLeaves.of(args, kwargs, argnums)
        pairs = zip(by.leaves, by.overwritten, strict=True)
        narrow = [not overwritten and _is_half(leaf) for leaf, overwritten in pairs]
        if not any(narrow):
            return jax.value_and_grad(function, argnums, has_aux=True)(*args, **kwargs)

        traced, rebuild = by.traced(function)

        def of_wide_leaves(wide: list[Any]) -> Any:
            inputs = [
                Wide(w, leaf.dtype) if n else w
                for w, leaf, n in zip(wide, by.leaves, narrow, strict=True)
            ]
            return rebuild([read(x) for x in evaluate(traced, inputs)])

        wide = [
            leaf.astype(jnp.float32) if n else leaf
            for leaf, n in zip(by.leaves, narrow, strict=True)
        ]
        value, gradients = jax.value_and_grad(of_wide_leaves, has_aux=True)(wide)
        return value, by.gradients(gradients)

    return differentiated


def _is_half(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return (
        dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    )

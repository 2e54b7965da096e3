"""Matmuls that return their accumulator and multiply in half precision backward too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from policy.core.reduction_dtype import reduction_dtype_of

Array = jax.Array


def einsum(
    subscripts: str, lhs: ArrayLike, rhs: ArrayLike, *, precision: PrecisionLike = None
) -> Array:
    """Contracts two operands as `jnp.einsum` does and returns the unrounded accumulator.

    Use it for matmuls whose result goes into a softmax, a loss or a sum, such as the logits of a
    hand-written attention. The forward and the backward matmuls multiply in the operands' dtype;
    `preferred_element_type` alone would make both backward matmuls multiply float32 by half
    precision.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> q, k = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((3, 64), jnp.bfloat16)
    >>> policy.reductions.einsum("qd,kd->qk", q, k).dtype
    dtype('float32')

    Args:
      subscripts: as in `jnp.einsum`, for two operands.
      lhs, rhs: floating arrays of one dtype.
      precision: as in `jax.lax`.

    Returns:
      The contraction in the policy's reduction_dtype, or float32 without a policy; in the operands'
      dtype where that is wider.

    Raises:
      TypeError: an operand is not floating, or the two have different dtypes.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.inexact):
        raise TypeError(
            f"einsum takes two floating operands of one dtype, but got {lhs.dtype} and {rhs.dtype}."
        )
    contract = functools.partial(jnp.einsum, subscripts, precision=precision)
    wide = reduction_dtype_of(lhs)
    return contract(lhs, rhs) if wide == lhs.dtype else accumulating(contract, wide)(lhs, rhs)


def accumulating(
    bilinear: Callable[..., Array], accumulator_dtype: DTypeLike
) -> Callable[..., Array]:
    """Returns a bilinear operation that keeps its accumulator; backward keeps the operands' dtype.

    `bilinear(lhs, rhs, preferred_element_type=...)` is called forward with `accumulator_dtype`.
    With that alone, JAX would multiply float32 by half precision in both backward operations, or
    refuse to (convolutions). Here the tangent is computed in the operands' dtype and then widened,
    so its transpose rounds the cotangent first. Forward and reverse mode both work.
    """
    dtype = jnp.dtype(accumulator_dtype)

    @jax.custom_jvp
    def run(lhs: Array, rhs: Array) -> Array:
        return bilinear(lhs, rhs, preferred_element_type=dtype)

    def run_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
        y = run(*primals)
        return y, bilinear_tangent(bilinear, primals, tangents, y)

    run.defjvp(run_jvp, symbolic_zeros=True)
    return run


def bilinear_tangent(
    bilinear: Callable[..., Array],
    operands: tuple[Array, Array],
    tangents: tuple[Any, Any],
    y: Array,
) -> Array:
    """Computes the tangent of a bilinear operation in the operands' dtype, cast to `y`'s."""
    pairs = ((tangents[0], operands[1]), (operands[0], tangents[1]))
    # a frozen operand costs nothing
    known = [not any(isinstance(x, SymbolicZero) for x in pair) for pair in pairs]
    parts = [bilinear(*pair) for pair, is_known in zip(pairs, known, strict=True) if is_known]
    return sum(parts[1:], parts[0]).astype(y.dtype) if parts else jnp.zeros_like(y)

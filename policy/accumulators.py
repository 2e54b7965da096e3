"""Matmuls that return their accumulator, and multiply half operands backward too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from policy.reductions import reduction_dtype

Array = jax.Array


def einsum(subscripts: str, lhs: ArrayLike, rhs: ArrayLike, *, precision: Any = None) -> Array:
    """`jnp.einsum` of two operands that hands on its accumulator: reduction_dtype from half operands, never rounded.

    For matmuls whose result goes into a softmax, a loss or a sum: the logits of an attention written by hand. Forward
    and backward multiply the operands' dtype, where `preferred_element_type` alone would make both backward matmuls
    float32 times half.

    Args:
      subscripts: as in `jnp.einsum`, of two operands.
      lhs, rhs: floating, of one dtype.
      precision: as in `jax.lax`.

    Returns:
      the contraction, in the policy's reduction_dtype, else float32; in the operands' dtype where that is wider.

    Raises:
      TypeError: an operand is not floating, or they have two dtypes.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.inexact):
        raise TypeError(f"einsum takes two floating operands of one dtype, but got {lhs.dtype} and {rhs.dtype}.")
    contract = functools.partial(jnp.einsum, subscripts, precision=precision)
    wide = reduction_dtype(lhs)
    return contract(lhs, rhs) if wide == lhs.dtype else accumulating(contract, wide)(lhs, rhs)


def accumulating(bilinear: Callable[..., Array], accumulator_dtype: DTypeLike) -> Callable[..., Array]:
    """A bilinear operation that returns its accumulator, with both backward operations in the operands' dtype.

    `bilinear(lhs, rhs, preferred_element_type=...)` is called forward with `accumulator_dtype`. With that alone, JAX
    would run both backward operations as float32 times half, or refuse (convolutions); here the tangent runs in the
    operands' dtype and is widened, so that the transpose rounds the cotangent first. Both modes of derivative work.
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
    bilinear: Callable[..., Array], operands: tuple[Array, Array], tangents: tuple[Any, Any], y: Array
) -> Array:
    """The tangent of a bilinear operation, run in the operands' dtype and returned in that of `y`, its result."""
    pairs = ((tangents[0], operands[1]), (operands[0], tangents[1]))
    known = [not any(isinstance(x, SymbolicZero) for x in pair) for pair in pairs]  # a frozen operand costs nothing
    parts = [bilinear(*pair) for pair, is_known in zip(pairs, known, strict=True) if is_known]
    return sum(parts[1:], parts[0]).astype(y.dtype) if parts else jnp.zeros_like(y)

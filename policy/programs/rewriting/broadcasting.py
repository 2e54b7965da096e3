"""Broadcasting elementwise operations in half precision.

The cotangent of the broadcast operand is summed in float32 and rounded once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.programs.protocols import Equation


def explicit_sharding(aval: Any) -> Any:
    """Returns the sharding of an array where all axes of its mesh are explicit, otherwise None."""
    sharding = getattr(aval, "sharding", None)
    is_explicit = (
        sharding is not None and not sharding.mesh.empty and sharding.mesh.are_all_axes_explicit
    )
    return sharding if is_explicit else None


def repeated(array: Any, shape: tuple[Any, ...], dtype: DTypeLike, sharding: Any) -> Any:
    """Broadcasts a float32 array and then casts it: its cotangent is summed in float32."""
    return jnp.broadcast_to(array, shape, out_sharding=sharding).astype(dtype)


def product(equation: Equation, a: Any, b: Any, dtype: DTypeLike) -> Any:
    """Returns the product or quotient of two arrays in half precision.

    Operands that are broadcast are given in float32.

    Args:
      equation: a `mul` or a `div`.
      a, b: its operands, of any floating dtype; at least one is broadcast.
      dtype: the half dtype to compute in.
    """
    compute = _multiplied if equation.primitive.name == "mul" else _divided
    result = equation.outvars[0].aval
    repeats = _Repeats(result.shape, jnp.dtype(dtype), explicit_sharding(result))
    return compute(repeats, a, b)


class _Repeats(tuple):
    """A shape, dtype and sharding, as a static argument."""

    def __new__(cls, shape: tuple[Any, ...], dtype: DTypeLike, sharding: Any) -> _Repeats:
        return super().__new__(cls, (shape, dtype, sharding))

    def __call__(self, array: Any) -> Any:
        shape, dtype, sharding = self
        if array.shape == shape:
            return self.narrowed(array)
        return repeated(array, shape, dtype, sharding)

    def narrowed(self, array: Any) -> Any:
        return array.astype(self[1])


# Broadcast in the primal too: where an operand is a tangent, this is what is transposed.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiplied(repeats: _Repeats, a: Any, b: Any) -> Any:
    return lax.mul(repeats(a), repeats(b))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _divided(repeats: _Repeats, a: Any, b: Any) -> Any:
    return lax.div(repeats(a), repeats(b))


def _multiplied_jvp(
    repeats: _Repeats, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Any, Any]:
    a, b = map(repeats.narrowed, primals)
    parts = [
        lax.mul(repeats(t), other)
        for t, other in zip(tangents, (b, a), strict=True)
        if not _is_zero(t)
    ]
    return lax.mul(a, b), _sum(parts, repeats)


def _divided_jvp(
    repeats: _Repeats, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Any, Any]:
    a, b = map(repeats.narrowed, primals)
    parts = []
    if not _is_zero(tangents[0]):
        parts.append(lax.div(repeats(tangents[0]), b))
    if not _is_zero(tangents[1]):
        parts.append(lax.div(lax.div(lax.mul(lax.neg(repeats(tangents[1])), a), b), b))
    return lax.div(a, b), _sum(parts, repeats)


_multiplied.defjvp(_multiplied_jvp, symbolic_zeros=True)
_divided.defjvp(_divided_jvp, symbolic_zeros=True)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _sum(parts: list[Any], repeats: _Repeats) -> Any:
    shape, dtype, _ = repeats
    return functools.reduce(lax.add, parts) if parts else jnp.zeros(shape, dtype)

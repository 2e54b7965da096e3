"""Half activations that are broadcast: their cotangents are summed in float32 and rounded once, as parameters' are."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy.amp.values import F32, Value, as_dtype, cast

# They repeat the numbers of their operand: the transpose sums over the copies.
REPEATS = frozenset(("broadcast_in_dim", "broadcast_to", "tile"))
# Their derivative reads the operand that is broadcast: the small array is saved for it, not the large one.
PRODUCTS = frozenset(("mul", "div"))


def is_repeated(value: Value, shape: tuple[Any, ...] | None, half: Any) -> bool:
    """Returns whether an elementwise operation in `half` repeats the numbers of a half activation along axes."""
    if shape is None or value.dtype != half or half == F32 or value.constant is not None:
        return False
    return bool(value.array.ndim) and value.array.shape != shape


def sharding_of(equation: Any) -> Any:
    """Returns the sharding of an equation's result, where the axes of the mesh are explicit; else None."""
    sharding = getattr(equation.outvars[0].aval, "sharding", None)
    is_explicit = sharding is not None and not sharding.mesh.empty and sharding.mesh.are_all_axes_explicit
    return sharding if is_explicit else None


def repeated(array: Any, shape: tuple[Any, ...], dtype: Any, sharding: Any) -> Any:
    """A float32 array, broadcast and then cast, so that its cotangent is summed in float32."""
    return cast(jnp.broadcast_to(array, shape, out_sharding=sharding), dtype)


def product(equation: Any, values: list[Value], arrays: list[Any], dtype: Any) -> list[Value]:
    """The product or quotient of two half values of which at least one is repeated; `arrays` holds the others."""
    shape, sharding = equation.outvars[0].aval.shape, sharding_of(equation)
    operands = [
        as_dtype(value, F32) if is_repeated(value, shape, dtype) else array
        for value, array in zip(values, arrays, strict=True)
    ]
    compute = _multiplied if equation.primitive.name == "mul" else _divided
    return [Value(compute(_Repeats(shape, jnp.dtype(dtype), sharding), *operands))]


class _Repeats(tuple):
    """A shape, dtype and sharding, as a static argument."""

    def __new__(cls, shape: tuple[Any, ...], dtype: Any, sharding: Any) -> _Repeats:
        return super().__new__(cls, (shape, dtype, sharding))

    def __call__(self, tangent: Any) -> Any:
        shape, dtype, sharding = self
        return tangent if tangent.shape == shape else repeated(tangent, shape, dtype, sharding)

    def narrowed(self, array: Any) -> Any:
        return cast(array, self[1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiplied(repeats: _Repeats, a: Any, b: Any) -> Any:
    return lax.mul(repeats.narrowed(a), repeats.narrowed(b))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _divided(repeats: _Repeats, a: Any, b: Any) -> Any:
    return lax.div(repeats.narrowed(a), repeats.narrowed(b))


def _multiplied_jvp(repeats: _Repeats, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    a, b = map(repeats.narrowed, _values(primals))
    parts = [lax.mul(repeats(t), other) for t, other in zip(tangents, (b, a), strict=True) if not _is_zero(t)]
    return lax.mul(a, b), _sum(parts, repeats)


def _divided_jvp(repeats: _Repeats, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    a, b = map(repeats.narrowed, _values(primals))
    parts = []
    if not _is_zero(tangents[0]):
        parts.append(lax.div(repeats(tangents[0]), b))
    if not _is_zero(tangents[1]):
        parts.append(lax.div(lax.div(lax.mul(lax.neg(repeats(tangents[1])), a), b), b))
    return lax.div(a, b), _sum(parts, repeats)


_multiplied.defjvp(_multiplied_jvp, symbolic_zeros=True)
_divided.defjvp(_divided_jvp, symbolic_zeros=True)


def _values(primals: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(primal, "primal", primal) for primal in primals)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _sum(parts: list[Any], repeats: _Repeats) -> Any:
    shape, dtype, _ = repeats
    return functools.reduce(lax.add, parts) if parts else jnp.zeros(shape, dtype)

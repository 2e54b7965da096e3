"""Operations on half-precision activations whose derivatives are sums.

Cotangents are summed in float32 and rounded once, as those of parameters are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.autocasting.values import CastValue, Values, cast
from policy.functions.cast_like import cast_like
from policy.functions.checkpointing import as_stored, keeping_inputs
from policy.programs.dtypes import F32, explicit_sharding, is_floating_dtype
from policy.programs.jaxprs import Equation, bind
from policy.programs.primitives import BROADCASTS, COUNTS_TIES, EXTREMES, REPEATS


class _Repeats(NamedTuple):
    """Broadcasts and casts to the shape, dtype and sharding of a result; a static argument."""

    shape: tuple[Any, ...]
    dtype: Any
    sharding: Any

    @classmethod
    def to(cls, aval: Any, dtype: DTypeLike) -> _Repeats:
        return cls(aval.shape, jnp.dtype(dtype), explicit_sharding(aval))

    def __call__(self, array: Any, like: Any = None) -> Any:
        if array.shape != self.shape:
            array = jnp.broadcast_to(array, self.shape, out_sharding=self.sharding)
        if like is None or array.dtype == self.dtype:
            return array.astype(self.dtype)
        return cast_like(array, like)


def repeated(array: Any, aval: Any, dtype: DTypeLike, like: Any = None) -> Any:
    """Broadcasts a float32 array and then casts it: its cotangent is summed in float32.

    So it is over axes along which `jax.vmap` maps `like`, but not the array.

    Args:
      array: the array.
      aval: of the shape of the result; None keeps the array's.
      dtype: of the result.
      like: an activation that meets the result, or None.
    """
    return _Repeats.to(array if aval is None else aval, dtype)(array, like)


# Broadcast in the primal too: where an operand is a tangent, this is what is transposed.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _combined(operation: Callable[..., Any], repeats: _Repeats, a: Any, b: Any) -> Any:
    """Multiplies or divides: `operation` is `lax.mul` or `lax.div`."""
    return operation(repeats(a), repeats(b))


@functools.partial(_combined.defjvp, symbolic_zeros=True)
def _combined_jvp(
    operation: Callable[..., Any], repeats: _Repeats, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    a, b = (primal.astype(repeats.dtype) for primal in primals)
    of_a, of_b = (not isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents)
    parts = [operation(repeats(tangents[0], b), b)] if of_a else []
    if of_b and operation is lax.mul:
        parts.append(lax.mul(repeats(tangents[1], a), a))
    elif of_b:
        parts.append(lax.div(lax.div(lax.mul(lax.neg(repeats(tangents[1], a)), a), b), b))
    parts = parts or [jnp.zeros(repeats.shape, repeats.dtype)]
    return operation(a, b), functools.reduce(lax.add, parts)


_FEW_TERMS = 4  # as many as windows of 3x3 with strides of 2 overlap: a sum that rounds three times


def is_broadcast(value: CastValue, shape: tuple[Any, ...] | None) -> bool:
    """Returns whether an operation broadcasts a value that is no constant.

    An elementwise one does to its result's `shape`, and `jax.vmap` to any parameter.
    """
    is_smaller = shape is not None and value.array.shape != shape
    return (is_smaller or value.yields) and value.constant is None and value.is_float


def broadcast_product(
    equation: Equation, values: Values, arrays: list[Any], dtype: DTypeLike
) -> Values:
    """Returns the product or quotient of values in half precision, of which one is broadcast.

    Args:
      equation: a `mul` or a `div`.
      values: its operands.
      arrays: the operands as arrays, read for those that are not broadcast.
      dtype: the half dtype to compute in.
    """
    result = equation.outvars[0].aval
    a, b = (
        value.as_dtype(F32) if is_broadcast(value, result.shape) else array
        for value, array in zip(values, arrays, strict=True)
    )
    operation = lax.mul if equation.primitive.name == "mul" else lax.div
    return [CastValue(_combined(operation, _Repeats.to(result, dtype), a, b))]


def sums_cotangents(equation: Equation, values: Values) -> bool:
    """Returns whether the derivative of an equation that moves half values is a sum."""
    if not any(value.is_half for value in values):
        return False
    name = equation.primitive.name
    if name == "pad":
        return values[1].constant is None
    if name in BROADCASTS | {"tile"}:
        return equation.invars[0].aval.size != equation.outvars[0].aval.size
    return name in REPEATS or (name in COUNTS_TIES and _overlapping(equation) > _FEW_TERMS)


def _overlapping(equation: Equation) -> float:
    """Returns how many windows an element can be in; infinity without windows."""
    params = equation.params
    if "window_strides" not in params:
        return math.inf
    pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return math.prod(-(-width // step) for width, step in pairs)


def widened_operand(equation: Equation, values: Values) -> Values:
    """Evaluates an equation that moves half values in float32, and casts its results back.

    The residuals are integers, or the half values themselves.
    """
    dtypes = [value.dtype for value in values if value.is_float]

    def run(*arrays: Any) -> list[Any]:
        outputs = bind(equation, arrays)
        floats = [output for output in outputs if is_floating_dtype(output.dtype)]
        back = iter(dtypes if len(dtypes) == len(floats) else dtypes[:1] * len(floats))
        return [cast(o, next(back)) if is_floating_dtype(o.dtype) else o for o in outputs]

    def widened(values: Iterable[CastValue]) -> list[Any]:
        return [one.as_dtype(F32) if one.is_half else one.array for one in values]

    if equation.primitive.name in EXTREMES:
        return [CastValue(_extremum(equation, values[0].array))]
    if equation.primitive.name not in COUNTS_TIES:
        return list(map(CastValue, run(*widened(values))))
    kept = keeping_inputs(lambda *arrays: run(*widened(map(CastValue, arrays))))
    return list(map(CastValue, kept(*(value.array for value in values))))


def _extremum(equation: Equation, x: Any) -> Any:
    """Returns the maxima or minima of a 16-bit array along axes, which are exact in any dtype.

    The derivative is that of JAX, the mean of the tangents of equal extrema, summed in float32.
    """
    axes = equation.params["axes"]

    def mean_of_equal(x: Any, out: Any, tangent: Any) -> Any:
        is_extremum = as_stored(x) == as_stored(lax.expand_dims(out, axes))
        total = functools.partial(jnp.sum, axis=axes, dtype=F32, where=is_extremum)
        return (total(tangent) / total(jnp.ones_like(x))).astype(out.dtype)

    run = jax.custom_jvp(lambda x: bind(equation, [x])[0])

    @run.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        out = run(*primals)
        return out, keeping_inputs(mean_of_equal)(*primals, out, *tangents)

    return run(x)

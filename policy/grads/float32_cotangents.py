"""Interpreter that casts half-precision values at each use: cotangents sum in float32.

JAX adds up the cotangents of a value in that value's dtype. Here such a value is carried as the
float32 one that it was cast from, and is cast at each use: the same values forward, float32 sums
backward. Primitives that only move data (reshape, broadcast, slice, gather) move the float32 value,
so that the gradients of a bias and of an embedding are float32 sums too. Results that are computed
from such values alone, such as the exponential of a temperature, are carried in the same way.
Bodies of `jit`, `scan`, `cond` and `checkpoint` are evaluated alike. Operands of `custom_vjp`,
`custom_jvp`, `while`, a jit with shardings of its own and other primitives with a body are cast
before them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.typing import DTypeLike

from policy._jaxpr import control_flow
from policy._jaxpr.broadcasting import product, repeated, sharding_of
from policy._jaxpr.control_flow import Body, is_placed
from policy._jaxpr.dtypes import F32, float_dtype
from policy._jaxpr.interpreter import Interpreter
from policy._jaxpr.primitives import MOVES_COTANGENTS, NARY, PRODUCTS, REMATS
from policy._jaxpr.protocols import Equation
from policy._jaxpr.subprograms import Subprogram, bind, opened, subprogram


@dataclasses.dataclass(frozen=True)
class Wide:
    """A float32 value that stands for a half-precision one, and is cast to it at each use.

    Attributes:
      value: the float32 (or float64) array.
      dtype: the half dtype.
      is_exact: whether `value` is what the half one widened would be; else code that widens it sees
        it rounded.
    """

    value: Any
    dtype: DTypeLike
    is_exact: bool = True


def read(x: Any) -> Any:
    """Returns a wide value as the half one that it stands for; others as they are."""
    return x.value.astype(x.dtype) if isinstance(x, Wide) else x


MOVING_JITS: dict[str, Callable[[jax.Array], jax.Array]] = {}
"""Functions for a float32 value, by the name of a jitted one that only moves its argument."""


def evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr whose inputs may be wide.

    Args:
      jaxpr: an open or closed jaxpr.
      inputs: arrays, or `Wide` ones where the jaxpr has half ones.
    """
    body, consts = opened(jaxpr)
    return Float32Cotangents().run(body, consts, inputs)


class Float32Cotangents(Interpreter[Any]):
    """Evaluates jaxprs on values that are arrays, or `Wide` ones."""

    def constant(self, array: Any) -> Any:
        return array

    def literal(self, literal: Literal) -> Any:
        return literal.val

    def arrays(self, value: Any) -> tuple[Any]:
        return (value.value if isinstance(value, Wide) else value,)

    def filled(self, value: Any, arrays: Sequence[Any]) -> Any:
        (array,) = arrays
        return dataclasses.replace(value, value=array) if isinstance(value, Wide) else array

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        moved = _moved(equation, values)
        if moved is not None:
            return moved
        if any(isinstance(x, Wide) for x in values):
            handler = _HANDLERS.get(equation.primitive.name)
            results = None if handler is None else handler(self, equation, values)
            if results is None:
                results = bind(equation, [read(x) for x in values])
            return list(map(_widened, results)) if _is_of_wide(equation, values) else results
        return bind(equation, values)

    def merge(
        self, equation: Equation, values: Sequence[Any], branches: Sequence[Any] = ()
    ) -> list[Any]:
        """Returns arrays: a carry is new each turn, and branches read their results."""
        return [variable.aval for variable in equation.outvars]

    def settled(self, value: Any, like: Any) -> Any:
        return read(value)


def _moved(equation: Equation, operands: list[Any]) -> list[Any] | None:
    """Returns the results of an equation that moves wide operands, or None."""
    name, is_wide = equation.primitive.name, [isinstance(x, Wide) for x in operands]
    if not any(is_wide):
        return None
    first = operands[0]
    if name in MOVES_COTANGENTS and is_wide[0] and not any(is_wide[1:]):
        moved = bind(equation, [first.value, *operands[1:]])
        return [dataclasses.replace(first, value=x) for x in moved]
    if name == "concatenate" and all(is_wide) and len({x.dtype for x in operands}) == 1:
        is_exact = all(x.is_exact for x in operands)
        return [Wide(x, first.dtype, is_exact) for x in bind(equation, [x.value for x in operands])]
    if name in NARY and _repeats_wide(equation, operands):
        return [_repeating(equation, operands)]
    if (
        name == "convert_element_type"
        and first.is_exact
        and _itemsize(equation.params["new_dtype"]) >= 4
    ):
        return bind(equation, [first.value])
    return None


def _is_of_wide(equation: Equation, operands: list[Any]) -> bool:
    """Returns whether results are computed from wide values alone, and are not larger.

    They are wide then: `exp(t) * x` sums the cotangent of `exp(t)` in float32 as `t * x` does.
    """
    pairs = list(zip(equation.invars, operands, strict=True))
    sizes = [atom.aval.size for atom, x in pairs if isinstance(x, Wide)]
    return (
        bool(sizes)
        and all(
            isinstance(x, Wide) or isinstance(atom, Literal) or float_dtype(atom.aval) is None
            for atom, x in pairs
        )
        and all(getattr(v.aval, "size", 0) <= max(sizes) for v in equation.outvars)
    )


def _widened(x: Any) -> Any:
    """Returns a half array as a wide one; a float32 one too, whose cast to half is wide again."""
    if isinstance(x, Wide):
        return x
    dtype = float_dtype(x)
    if dtype is None or dtype.itemsize < 2:
        return x
    return Wide(x.astype(F32) if dtype.itemsize < 4 else x, dtype)


def _is_repeated(atom: Any, x: Any, result: Any) -> bool:
    is_half = isinstance(x, Wide) and _itemsize(x.dtype) < 4
    return is_half and atom.aval.shape != result.aval.shape


def _repeats_wide(equation: Equation, operands: list[Any]) -> bool:
    pairs = zip(equation.invars, operands, strict=True)
    return any(_is_repeated(atom, x, equation.outvars[0]) for atom, x in pairs)


def _repeating(equation: Equation, operands: list[Any]) -> Any:
    """Applies an elementwise operation that broadcasts wide operands, scalars included."""
    result = equation.outvars[0]
    if equation.primitive.name in PRODUCTS:
        dtype = result.aval.dtype
        a, b = (
            x.value if _is_repeated(atom, x, result) else read(x)
            for atom, x in zip(equation.invars, operands, strict=True)
        )
        return product(equation, a, b, dtype)
    arrays = [
        repeated(x.value, result.aval.shape, x.dtype, sharding_of(equation))
        if _is_repeated(atom, x, result)
        else read(x)
        for atom, x in zip(equation.invars, operands, strict=True)
    ]
    (output,) = bind(equation, arrays)
    return output


def _itemsize(dtype: DTypeLike) -> int:
    return np.dtype(dtype).itemsize


# Each of the following rebuilds one kind of equation, or returns None: then the equation runs as it
# is.


@functools.lru_cache(maxsize=1024)
def _jitted(
    program: Subprogram, kinds: tuple[tuple[Any, bool] | None, ...], name: str
) -> tuple[Any, Body[Any]]:
    """Returns one jitted function for each body: called outside of jit, it compiles once."""
    inputs = [None if kind is None else Wide(None, *kind) for kind in kinds]
    body = Body.of(Float32Cotangents(), program, inputs)

    def call(*arrays: Any) -> list[Any]:
        return body.arrays(*arrays)

    call.__name__ = name
    return jax.jit(call), body


def _jit(run: Float32Cotangents, equation: Equation, operands: list[Any]) -> list[Any] | None:
    """Donates no operand: a wide one may be a parameter that is read elsewhere."""
    name = equation.params["name"]
    move = MOVING_JITS.get(name)
    if move is not None and isinstance(operands[0], Wide):
        return [dataclasses.replace(operands[0], value=move(operands[0].value))]
    if is_placed(equation):
        return None  # a jit made anew would lose its shardings
    kinds = tuple((x.dtype, x.is_exact) if isinstance(x, Wide) else None for x in operands)
    call, body = _jitted(subprogram(equation, "call"), kinds, name)
    results = call(*run.flat(operands))
    return run.refilled(body.outputs, results)


def _checkpoint(
    run: Float32Cotangents, equation: Equation, operands: list[Any]
) -> list[Any] | None:
    is_differentiated = equation.params["differentiated"]
    return None if is_differentiated else control_flow.remat(run, equation, operands)


def _cond(run: Float32Cotangents, equation: Equation, operands: list[Any]) -> list[Any] | None:
    return (
        None
        if control_flow.is_for_platforms(equation)
        else control_flow.cond(run, equation, operands)
    )


_HANDLERS: Mapping[str, Callable[[Float32Cotangents, Any, list[Any]], list[Any] | None]] = {
    "jit": _jit,
    **dict.fromkeys(REMATS, _checkpoint),
    "scan": control_flow.scan,
    "cond": _cond,
}

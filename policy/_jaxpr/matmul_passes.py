"""Float32 matmuls in the passes that a TPU or GPU takes for them, emulated on any device.

A TPU multiplies bfloat16. At the default precision float32 operands are rounded to it, in one pass;
"high" splits each operand in two bfloat16 numbers and takes three passes, and "highest" takes six,
which is float32. An NVIDIA GPU rounds operands to TF32, of 11 bits, except at "highest".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax

from policy._jaxpr.control_flow import handler_of
from policy._jaxpr.dtypes import F32
from policy._jaxpr.interpreter import Interpreter
from policy._jaxpr.primitives import MATMULS
from policy._jaxpr.protocols import Equation
from policy._jaxpr.subprograms import bind, opened

Device = Literal["tpu", "gpu"]
_HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_MANTISSAS = {"tpu": 7, "gpu": 10}  # explicit bits of bfloat16 and of TF32


def emulated(fn: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """Returns `fn` with its float32 matmuls as a device multiplies them.

    A gradient is emulated by ``emulated(jax.grad(fn), device)``. Matmuls of another precision than
    default, high and highest, and of other dtypes, stay as they are.

    Args:
      fn: a function of trees of arrays, which returns one.
      device: "tpu" or "gpu".

    Raises:
      ValueError: another device.
    """
    require_device(device)

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        body, consts = opened(jaxpr)
        results = _Passes(device).run(body, consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def require_device(device: str) -> None:
    """Raises ValueError for a device whose passes are not known."""
    if device not in _MANTISSAS:
        raise ValueError(f"The passes of 'tpu' and 'gpu' are known, but not those of {device!r}.")


class _Passes(Interpreter[Any]):
    """Evaluates a program, each of whose values is an array."""

    def __init__(self, device: Device):
        super().__init__()
        self.device: Device = device

    def constant(self, array: Any) -> Any:
        return array

    def arrays(self, value: Any) -> Sequence[Any]:
        return (value,)

    def filled(self, value: Any, arrays: Sequence[Any]) -> Any:
        return arrays[0]

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        if is_in_passes(equation):
            return in_passes(equation, values, self.device)
        return bind(equation, values)


def is_in_passes(equation: Equation) -> bool:
    """Returns whether an equation is a float32 matmul of less precision than the highest."""
    if equation.primitive.name not in MATMULS:
        return False
    if any(getattr(v.aval, "dtype", None) != F32 for v in equation.invars[:2]):
        return False
    level = _level(equation)
    return level is None or level in (lax.Precision.DEFAULT, lax.Precision.HIGH)


def _level(equation: Equation) -> Any:
    precision = equation.params.get("precision")
    return precision[0] if isinstance(precision, tuple) else precision


def in_passes(equation: Equation, arrays: Sequence[Any], device: Device) -> list[Any]:
    """Returns the result of such a matmul, as a device multiplies it."""

    def product(lhs: Any, rhs: Any) -> Any:
        params = equation.params | {"precision": _HIGHEST}
        return bind(equation, [lhs, rhs, *arrays[2:]], params)[0]

    (high, low), (high_rhs, low_rhs) = (_split(array, device) for array in arrays[:2])
    result = product(high, high_rhs)
    if _level(equation) == lax.Precision.HIGH and device == "tpu":
        result = result + (product(high, low_rhs) + product(low, high_rhs))
    return [result]


def _split(array: Any, device: Device) -> tuple[Any, Any]:
    """Returns an array rounded to a device's operands, and what is lost, rounded too."""
    rounded = functools.partial(
        lax.reduce_precision, exponent_bits=8, mantissa_bits=_MANTISSAS[device]
    )
    high = rounded(array)
    return high, rounded(array - high)

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
    if device not in _MANTISSAS:
        raise ValueError(f"The passes of 'tpu' and 'gpu' are known, but not those of {device!r}.")

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        body, consts = opened(jaxpr)
        results = _Passes(device).run(body, consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


class _Passes(Interpreter[Any]):
    """Evaluates a program, each of whose values is an array."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def constant(self, array: Any) -> Any:
        return array

    def arrays(self, value: Any) -> Sequence[Any]:
        return (value,)

    def filled(self, value: Any, arrays: Sequence[Any]) -> Any:
        return arrays[0]

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        precision = equation.params.get("precision")
        is_float32 = all(getattr(v.aval, "dtype", None) == F32 for v in equation.invars[:2])
        if equation.primitive.name not in MATMULS or not is_float32:
            return bind(equation, values)
        if precision is not None and not isinstance(precision, (tuple, lax.Precision)):
            return bind(equation, values)  # an algorithm
        level = precision[0] if isinstance(precision, tuple) else precision
        if level == lax.Precision.HIGHEST:
            return bind(equation, values)
        return [self._passes(equation, values, level)]

    def _passes(self, equation: Equation, values: list[Any], level: Any) -> Any:
        def product(lhs: Any, rhs: Any) -> Any:
            params = equation.params | {"precision": _HIGHEST}
            return bind(equation, [lhs, rhs, *values[2:]], params)[0]

        (high, low), (high_rhs, low_rhs) = map(self._split, values[:2])
        result = product(high, high_rhs)
        if level == lax.Precision.HIGH and self.device == "tpu":
            result = result + (product(high, low_rhs) + product(low, high_rhs))
        return result

    def _split(self, array: Any) -> tuple[Any, Any]:
        """Returns an array rounded to the device's operands, and what is lost, rounded too."""
        rounded = functools.partial(
            lax.reduce_precision, exponent_bits=8, mantissa_bits=_MANTISSAS[self.device]
        )
        high = rounded(array)
        return high, rounded(array - high)

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

from policy.programs.control_flow import handler_of
from policy.programs.dtypes import F32
from policy.programs.interpreter import Interpreter
from policy.programs.primitives import MATMULS
from policy.programs.protocols import Equation
from policy.programs.subprograms import bind, opened

Device = Literal["tpu", "gpu"]
_HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_PARTS = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2, lax.Precision.HIGHEST: 3}  # on a TPU
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

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        if is_in_passes(equation):
            return in_passes(equation, values, self.device)
        return bind(equation, values)


def is_in_passes(equation: Equation) -> bool:
    """Returns whether an operand of a float32 matmul is below the highest precision."""
    if equation.primitive.name not in MATMULS:
        return False
    if any(getattr(v.aval, "dtype", None) != F32 for v in equation.invars[:2]):
        return False
    levels = _levels(equation)
    return all(level in _PARTS for level in levels) and levels != _HIGHEST


def _levels(equation: Equation) -> tuple[Any, Any]:
    """Returns the precision of each operand of a matmul."""
    precision = equation.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    lhs, rhs = (lax.Precision.DEFAULT if level is None else level for level in pair)
    return lhs, rhs


def in_passes(equation: Equation, arrays: Sequence[Any], device: Device) -> list[Any]:
    """Returns the result of such a matmul, as a device multiplies it.

    A TPU splits each operand by its own precision. On a GPU the higher one holds for both.
    """
    levels = _levels(equation)
    params = equation.params | {"precision": _HIGHEST}
    if device == "gpu":
        if lax.Precision.HIGHEST in levels:
            return bind(equation, arrays, params)
        levels = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    lhs, rhs = (
        _parts(array, device, _PARTS[level])
        for array, level in zip(arrays[:2], levels, strict=True)
    )
    products = [
        bind(equation, [left, right, *arrays[2:]], params)[0]
        for i, left in enumerate(lhs)
        for right in rhs[: max(len(lhs), len(rhs)) - i]
    ]
    return [sum(products[1:], start=products[0])]


def _parts(array: Any, device: Device, count: int) -> list[Any]:
    """Returns operands of a device whose sum is an array, the largest first."""
    parts: list[Any] = []
    for _ in range(count):
        parts.append(lax.reduce_precision(array, 8, _MANTISSAS[device]))
        array = array - parts[-1]
    return parts

"""Float32 matmuls in the passes that a TPU or GPU takes for them.

A TPU multiplies bfloat16. At the default precision float32 operands are rounded to it, in one pass;
"high" splits each operand in two bfloat16 numbers and takes three passes, and "highest" takes six,
which is float32. An NVIDIA GPU rounds operands to TF32, of 11 bits, except at "highest".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jax import lax

from policy.programs.dtypes import F32
from policy.programs.jaxprs import Equation, bind
from policy.programs.primitives import MATMULS

Device = Literal["tpu", "gpu"]
ALL_PASSES = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_PARTS = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2, lax.Precision.HIGHEST: 3}  # on a TPU
_MANTISSAS = {"tpu": 7, "gpu": 10}  # explicit bits of bfloat16 and of TF32


def require_device(device: str) -> None:
    """Raises ValueError for a device whose passes are not known."""
    if device not in _MANTISSAS:
        raise ValueError(f"The passes of 'tpu' and 'gpu' are known, but not those of {device!r}.")


def is_in_passes(equation: Equation) -> bool:
    """Returns whether an operand of a float32 matmul is below the highest precision."""
    if equation.primitive.name not in MATMULS:
        return False
    if any(getattr(v.aval, "dtype", None) != F32 for v in equation.invars[:2]):
        return False
    levels = _levels(equation)
    return all(level in _PARTS for level in levels) and levels != ALL_PASSES


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
    params = equation.params | {"precision": ALL_PASSES}
    if device == "gpu":
        if lax.Precision.HIGHEST in levels:
            return bind(equation, arrays, params)
        levels = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    pairs = zip(arrays[:2], levels, strict=True)
    lhs, rhs = (_parts(array, device, _PARTS[level]) for array, level in pairs)
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

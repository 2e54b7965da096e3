"""Kinds of operations, and the dtypes in which they run."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.programs.primitives import (
    CASTS,
    CONVOLUTIONS,
    DOTS,
    STEEP,
    SUMMING_COLLECTIVES,
    TRANSCENDENTALS,
    of_kinds,
)
from policy.programs.protocols import Equation

HALVES = frozenset(("bfloat16", "float16"))
WIDES = frozenset(("float32", "float64"))
OPERATION_KINDS = (
    "dot",
    "convolution",
    "reduction",
    "scatter-add",
    "transcendental",
    "collective",
    "cast",
    "opaque",
    "other",
)


_KINDS = {
    "dot": DOTS,
    "convolution": CONVOLUTIONS,
    "scatter-add": of_kinds("scatter-sum"),
    "transcendental": TRANSCENDENTALS,
    "collective": of_kinds("collective-reduce", "collective-move"),
    "cast": CASTS,
    "opaque": of_kinds("kernel", "attention-bwd", "linalg", "fft"),
    "reduction": of_kinds("reduction", "cumulative", "window", "select-sum"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def kind_of(name: str) -> str:
    """Returns the kind of a primitive by its name: one of `OPERATION_KINDS`."""
    return _KIND_OF.get(name, "other")


def is_steep(name: str) -> bool:
    """Returns whether a function is as sensitive as an exponential, a logarithm or a power."""
    return name in STEEP


def sums(equation: Equation) -> bool:
    """Returns whether an equation adds numbers one by one, as a sum, a scatter or a collective."""
    name = equation.primitive.name
    return kind_of(name) in ("reduction", "scatter-add") or name in SUMMING_COLLECTIVES


def dtype_name_of(atom: Any) -> str:
    """Returns the name of the dtype of a variable or literal; "" if it has none."""
    return dtype_name(getattr(getattr(atom, "aval", None), "dtype", None))


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: DTypeLike) -> str:
    """Returns the name of a dtype, also of one for random keys; "" for None."""
    return "" if dtype is None else str(dtype)


def operands_of(equation: Equation) -> tuple[str, ...]:
    """Returns the dtypes of the inexact operands of an equation, or of all if none is inexact."""
    dtypes = [dtype for atom in equation.invars if (dtype := dtype_name_of(atom))]
    numbers = [dtype for dtype in dtypes if is_inexact_name(dtype)]
    return tuple(numbers or dtypes)


def result_of(equation: Equation) -> str:
    """Returns the dtype of the first result of an equation; "" if it has none."""
    return dtype_name_of(equation.outvars[0]) if equation.outvars else ""


@functools.cache
def is_inexact_name(dtype: str) -> bool:
    """Returns whether the dtype of a name is floating or complex."""
    return dtype.startswith(("float", "bfloat", "complex"))


def accumulation_of(equation: Equation) -> str:
    """Returns the declared accumulation dtype of an equation; see `Operation.accumulation`."""
    kind, operands = kind_of(equation.primitive.name), operands_of(equation)
    if kind in ("dot", "convolution"):
        return _of_matmul(equation, operands)
    if sums(equation):
        return operands[0] if operands else ""
    return ""


def float32_precision_of(equation: Equation) -> str:
    """Returns the precision of a matmul of float32 operands; see `Operation.precision`."""
    if kind_of(equation.primitive.name) not in ("dot", "convolution"):
        return ""
    if any(dtype != "float32" for dtype in operands_of(equation)):
        return ""
    precision = equation.params.get("precision")
    if precision is None:
        return "default"
    if isinstance(precision, tuple):
        levels = sorted(set(precision), key=lambda each: each.value, reverse=True)
        return ", ".join(level.name.lower() for level in levels)
    return precision.name.lower() if isinstance(precision, lax.Precision) else str(precision)


def _of_matmul(equation: Equation, operands: tuple[str, ...]) -> str:
    """Returns the accumulation dtype of a matmul.

    It is the declared one, or else that of a wide result; "backend" if both the operands and the
    result are narrow.
    """
    declared = getattr(equation.params.get("precision"), "accumulation_type", None)
    if declared is not None:
        return str(np.dtype(declared))
    preferred = equation.params.get("preferred_element_type")
    preferred = None if preferred is None else str(np.dtype(preferred))
    narrow = {dtype for dtype in operands if dtype in HALVES or dtype.startswith("float8")}
    if preferred in WIDES or not narrow:
        return preferred or (operands[0] if operands else "")
    return "backend"

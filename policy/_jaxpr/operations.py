"""What kind of operation an equation is, and in which dtypes it runs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from policy._jaxpr.primitives import (
    CASTS,
    COLLECTIVES,
    CONVOLUTIONS,
    DOTS,
    OPAQUE_ALGORITHMS,
    REDUCTION_SUMS,
    SCATTER_SUMS,
    STEEP,
    SUMMING_COLLECTIVES,
    TRANSCENDENTALS,
)

HALVES = frozenset(("bfloat16", "float16"))
WIDES = frozenset(("float32", "float64"))
KINDS = (
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


@functools.cache
def _kinds() -> dict[str, str]:
    table = {
        "dot": DOTS,
        "convolution": CONVOLUTIONS,
        "scatter-add": SCATTER_SUMS,
        "transcendental": TRANSCENDENTALS,
        "collective": COLLECTIVES,
        "cast": CASTS,
        "opaque": OPAQUE_ALGORITHMS,
        "reduction": REDUCTION_SUMS,
    }
    return {name: kind for kind, names in table.items() for name in names}


def kind_of(name: str) -> str:
    """The kind of a primitive, by its name: one of `KINDS`."""
    return _kinds().get(name, "other")


def is_steep(name: str) -> bool:
    """Whether a function is an exponential, a logarithm or a power, or as sensitive as these: no
    activation.
    """
    return name in STEEP


def sums(equation: Any) -> bool:
    """Whether an equation adds numbers up one by one: a sum, a scatter, a collective that sums."""
    name = equation.primitive.name
    return kind_of(name) in ("reduction", "scatter-add") or name in SUMMING_COLLECTIVES


def dtype_of(atom: Any) -> str:
    """The name of a variable's or literal's dtype; "" for what has none."""
    return name_of(getattr(getattr(atom, "aval", None), "dtype", None))


@functools.lru_cache(maxsize=256)
def name_of(dtype: Any) -> str:
    """The name of a dtype, a key's included; "" of None."""
    return "" if dtype is None else str(dtype)


def operands_of(equation: Any) -> tuple[str, ...]:
    """The dtypes of an equation's operands: of those that are floating or complex, where there are
    any.
    """
    dtypes = [dtype for atom in equation.invars if (dtype := dtype_of(atom))]
    numbers = [dtype for dtype in dtypes if is_inexact(dtype)]
    return tuple(numbers or dtypes)


def result_of(equation: Any) -> str:
    """The dtype of an equation's first result; "" where it has none."""
    return dtype_of(equation.outvars[0]) if equation.outvars else ""


@functools.cache
def is_inexact(dtype: str) -> bool:
    """Whether a dtype, by its name, is of floating or complex numbers."""
    return dtype.startswith(("float", "bfloat", "complex"))


def accumulation_of(equation: Any) -> str:
    """The dtype that an equation is declared to sum in: see `Operation.accumulation`."""
    kind, operands = kind_of(equation.primitive.name), operands_of(equation)
    if kind in ("dot", "convolution"):
        return _of_matmul(equation, operands)
    if sums(equation):
        return operands[0] if operands else ""
    return ""


def _of_matmul(equation: Any, operands: tuple[str, ...]) -> str:
    """A matmul's: what its algorithm or its result says, as far as that is wider than the operands."""
    declared = getattr(equation.params.get("precision"), "accumulation_type", None)
    if declared is not None:
        return str(np.dtype(declared))
    preferred = equation.params.get("preferred_element_type")
    preferred = None if preferred is None else str(np.dtype(preferred))
    narrow = {dtype for dtype in operands if dtype in HALVES or dtype.startswith("float8")}
    if preferred in WIDES or not narrow:
        return preferred or (operands[0] if operands else "")
    return "backend"

"""Numpy numbers in float64 mode: float64 that comes from them alone is computed in float32.

Where `jax_enable_x64` is set, ``x / np.sqrt(8)`` is float64 to JAX, since numpy's numbers are.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from jax.extend.core import Literal

from policy.autocasting.source_lines import is_of_jax
from policy.autocasting.values import CastValue, Values, cast
from policy.programs.dtypes import F32, float_dtype
from policy.programs.jaxprs import Equation, subprograms

_F64 = np.dtype(np.float64)


def without_float64(equation: Equation, values: Values) -> tuple[Equation, Values]:
    """Returns an equation in float32 and its operands, where no operand but numbers is float64.

    Other equations are returned as they are.
    """
    atoms = (*equation.invars, *equation.outvars)
    if not any(map(_is_of_float64, atoms)) or subprograms(equation):
        return equation, values
    if equation.primitive.name == "bitcast_convert_type":  # random numbers are made of bits
        return equation, values
    pairs = zip(equation.invars, values, strict=True)
    others = [v for atom, v in pairs if v.constant is None and not isinstance(atom, Literal)]
    if any(value.dtype == _F64 for value in others):
        return equation, values
    is_cast = equation.primitive.name == "convert_element_type"
    if is_cast and not (is_of_jax(equation) and float_dtype(equation.invars[0].aval) == F32):
        return equation, values
    params = {name: F32 if _is_f64(value) else value for name, value in equation.params.items()}
    new: Any = equation
    new = new.replace(
        invars=list(map(_in_float32, equation.invars)),
        outvars=list(map(_in_float32, equation.outvars)),
        params=params,
    )
    return new, [
        CastValue(cast(v.array, F32), yields=True, constant=v.constant, is_mask=v.is_mask)
        if v.dtype == _F64
        else v
        for v in values
    ]


def _is_f64(value: Any) -> bool:
    return isinstance(value, (np.dtype, type)) and value == _F64


def _is_of_float64(atom: Any) -> bool:
    dtype = float_dtype(atom.aval)
    return dtype is not None and dtype == _F64  # NumPy takes None for float64


def _in_float32(atom: Any) -> Any:
    if not _is_of_float64(atom):
        return atom
    return types.SimpleNamespace(aval=atom.aval.update(dtype=F32))

"""Names that this library puts on JAX's name stack.

They tell its own casts, the dtypes of modules in a user's code, and layers with policies.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.programs.dtypes import F32, is_floating_dtype
from policy.programs.jaxprs import Equation
from policy.programs.thread import thread

BOUNDARY = "policy_boundary"
"""The scope of the casts where a call crosses from one policy to another."""

ISLAND = "policy_full_precision"
"""The scope that `policy.full_precision` keeps in float32."""

AUTOCAST = "policy_autocast"
"""The scope of the casts that autocast puts in."""

REGION = "policy_region_"
"""The prefix of the marks below."""

EXCHANGE = f"{REGION}exchange"
"""The scope of a sum over devices in a dtype that the caller asked for."""


def innermost_scope(equation: Equation) -> str:
    """Returns the innermost name on the stack of an equation, transforms aside."""
    return re.split("[/(]", str(equation.source_info.name_stack).rstrip(")"))[-1]


LAYER = f"{REGION}layer"  # a layer that obeys a policy itself
RETURNED = f"{REGION}returned"  # its result, for the code around it
KEPT = f"{REGION}kept"  # a parameter that no policy casts
NO_POLICY = f"{REGION}no_policy"  # a block of None or float32 inside of a policy
UNROUNDED = f"{REGION}unrounded"  # a matmul of which a line asks for a float32 result
_COMPUTE = f"{REGION}computes_in_"
_CALL = f"{REGION}call_"
_ATTENTION = f"{REGION}attention_"
_attentions: dict[str, int] = {}  # the texts, and their numbers in order
_computes_in: dict[str, tuple[np.dtype, Any, str | None]] = {}


def without_marks(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path without this library's own scopes, which rules don't match."""
    return tuple(name for name in path if name != ISLAND and not name.startswith(REGION))


def layer() -> contextlib.AbstractContextManager[Any]:
    """Marks the program of a layer: autocast leaves its dtypes as they are traced."""
    return jax.named_scope(LAYER)


def computes_in(
    dtype: np.dtype, matmul: Hashable = None, precision: str | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Marks the code of a module: autocast runs it in `dtype`, except inside other marks.

    Args:
      dtype: the module's compute_dtype.
      matmul: the 8-bit dtypes of its matmuls, or None.
      precision: that of its matmuls, or None.
    """
    return jax.named_scope(_name_of(dtype, matmul, precision))


def operation_in_float32() -> str:
    """Returns the mark of an operation whose operands a line casts to float32."""
    return _name_of(F32, None, "highest")


def numbered_call(number: int) -> contextlib.AbstractContextManager[Any]:
    """Marks the equations of one call, which no name on the stack tells from others."""
    return jax.named_scope(f"{_CALL}{number}")


def attention(program: str) -> contextlib.AbstractContextManager[Any]:
    """Marks an attention with the program that computes it, or the reason why no kernel does."""
    number = _attentions.setdefault(program, len(_attentions))
    return jax.named_scope(f"{_ATTENTION}{number}")


def attention_of(name_stack: Any) -> str | None:
    """Returns what the innermost `attention` mark on a name stack says, or None."""
    found = re.findall(rf"{_ATTENTION}(\d+)", str(name_stack)) if _attentions else ()
    return [*_attentions][int(found[-1])] if found else None


@functools.cache
def _name_of(dtype: np.dtype, matmul: Hashable, precision: str | None) -> str:
    name = f"{_COMPUTE}{dtype.name}"
    if (matmul, precision) != (None, None):
        name += f"_{sum(known.startswith(name) for known in _computes_in)}"
    _computes_in[name] = dtype, matmul, precision
    return name


def innermost(path: tuple[str, ...]) -> str | tuple[np.dtype, Any, str | None] | None:
    """Returns what the innermost mark of a path says.

    Returns `LAYER` for a layer, the arguments of `computes_in` for a module's own code, and None
    without a mark. A block of `use_policy` with None or float32 computes in float32.
    """
    for name in reversed(path):
        if name == LAYER:
            return LAYER
        if name == NO_POLICY:
            return F32, None, None
        if name in _computes_in:
            return _computes_in[name]
    return None


def returned(array: Any) -> Any:
    """Returns the result of a layer, an island or a module of another policy, as float32.

    The code around it reads it in its own dtype: autocast removes the mark.
    """
    result, wide = _marked(array, RETURNED), thread.wide
    if wide is not None and result is not array and array.dtype == F32:
        wide.append(result)
    return result


def is_wide_result(array: Any) -> bool:
    """Returns whether an array is a float32 input, or a result that `returned` marked."""
    return any(array is result for result in thread.wide or ())


def returned_if_half(array: Any) -> Any:
    """Returns a half-precision array as float32, marked as `returned`; others as they are."""
    return array if getattr(array, "dtype", None) == F32 else _marked(array, RETURNED)


def read_in(array: Any, dtype: DTypeLike | None) -> Any:
    """Returns a parameter that a user's code asks to read in a dtype; None stands for float32.

    In float32 it holds against half-precision activations; another dtype is an explicit cast.
    """
    if not is_floating_dtype(array.dtype) or dtype is None or np.dtype(dtype) == F32:
        return _marked(array, KEPT)
    return lax.convert_element_type(array, dtype)


def _marked(array: Any, name: str) -> Any:
    dtype: Any = getattr(array, "dtype", np.bool_)
    if not is_floating_dtype(dtype) or dtype.itemsize > F32.itemsize or dtype.itemsize < 2:
        return array
    target = thread.traced_dtype if name == RETURNED and thread.traced_dtype else F32
    if dtype == target != F32:
        return array
    with jax.named_scope(name):
        if dtype != target:
            return lax.convert_element_type(array, target)
        return lax.reduce_precision(array, exponent_bits=8, mantissa_bits=23)  # the identity


def mark_of(equation: Equation) -> str | None:
    """Returns `RETURNED` or `KEPT` for the equation that such a mark is, or None."""
    scopes = equation.source_info.name_stack.stack
    name = getattr(scopes[-1], "name", None) if scopes else None
    return name if name in (RETURNED, KEPT) else None


@functools.lru_cache(maxsize=4096)
def without(name_stack: Any) -> Any:
    """Returns a name stack of JAX's without these marks."""
    scopes = name_stack.stack
    kept = tuple(scope for scope in scopes if not _is_of_own_code(getattr(scope, "name", "")))
    return name_stack if len(kept) == len(scopes) else type(name_stack)(kept)


def _is_of_own_code(name: str) -> bool:
    return name in (LAYER, RETURNED, KEPT, UNROUNDED) or name.startswith((_COMPUTE, _CALL))

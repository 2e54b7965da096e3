"""The values that autocast computes with, and the dtype of operations on them.

A value is an array with facts that decide its dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.programs.dtypes import F32, float_dtype, is_floating_dtype
from policy.programs.jaxprs import Equation, bind
from policy.programs.marks import AUTOCAST


@dataclasses.dataclass(slots=True, eq=False)
class CastValue:
    """A value of the traced program, as autocast computes it.

    Attributes:
      array: the array, in the dtype of the trace, or in compute_dtype where the trace has float32.
      yields: whether it follows half-precision activations: a stored param, a constant, and values
        computed from those alone. A float32 value that doesn't yield keeps operations with it in
        float32.
      weak: whether it is an input of a module's call, which follows half-precision activations of
        its own shape: a stream of activations begins with it.
      is_table: whether it is made of parameters, constants, integers and random keys alone, in the
        range of half precision. In float32 it meets half-precision activations without widening
        what follows.
      constant: the value of all elements, if they are known to be equal.
      narrows: whether a normalisation computed it in float32, to be half precision for other
        modules.
      narrowed: the half-precision value for other modules, once one has read it.
      widened: the same array in float32, once an operation has requested it.
      transposed: the value that this one is a transposition of, and its axes.
      is_shared: whether it is a half-precision param that several operations read, in float32.
    """

    array: Any
    yields: bool = False
    constant: Any = None
    narrows: bool = False
    narrowed: CastValue | None = None
    widened: Any = None
    transposed: tuple[CastValue, tuple[int, ...]] | None = None
    weak: bool = False
    is_table: bool = False
    is_shared: bool = False

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def narrowed_to(self, dtype: np.dtype) -> CastValue:
        """Returns the value as readers outside of its normalisation get it, in a half `dtype`."""
        if not self.narrows or dtype == F32:
            return self
        if self.narrowed is None or self.narrowed.dtype != dtype:
            # One cast for all readers, as an author writes it: queries, keys and values would each
            # save a copy.
            self.narrowed = CastValue(cast(self.array, dtype))
        return self.narrowed

    def with_array(self, array: Any) -> CastValue:
        """Returns a value with the same facts about another array."""
        return dataclasses.replace(self, array=array, narrowed=None, widened=None, transposed=None)


Evaluated = tuple[str, list[CastValue]]
"""The treatment of an equation, as reports name it, and its outputs."""


def floats_of(values: Sequence[CastValue]) -> list[CastValue]:
    return [value for value in values if is_floating_dtype(value.dtype)]


def is_half_value(value: CastValue) -> bool:
    return is_floating_dtype(value.dtype) and value.dtype.itemsize < F32.itemsize


def cast(array: Any, dtype: DTypeLike) -> Any:
    """Casts `array` to `dtype`; returns it unchanged if it has that dtype."""
    if array.dtype == dtype:
        return array
    with jax.named_scope(AUTOCAST):  # a cast that the author did not write: reports can tell
        return lax.convert_element_type(array, dtype)


def as_dtype(value: CastValue, dtype: np.dtype) -> Any:
    """Returns `value` in `dtype`.

    A half-precision value is widened once for all readers, so that its cotangents are summed in
    float32 and rounded once. A float32 value is narrowed at each use, for the same reason.
    """
    if value.array.dtype == dtype:
        return value.array
    if value.array.dtype.itemsize >= dtype.itemsize:
        if value.transposed is not None:
            # Cast, then transposed, as an author writes it: XLA folds a transposition that stands
            # beside a matmul into it, also the one of the gradient. Past a cast it can't, and
            # XLA:CPU then multiplies in another order.
            source, axes = value.transposed
            return lax.transpose(as_dtype(source, dtype), axes)
        return cast(value.array, dtype)
    if value.widened is None or value.widened.dtype != dtype:
        value.widened = cast(value.array, dtype)
    return value.widened


def widened_param(value: CastValue) -> CastValue:
    """Returns a param in float32, so that its cotangents are summed there."""
    return CastValue(as_dtype(value, F32), yields=True)


def as_traced(atoms: Sequence[Any], values: Sequence[CastValue]) -> list[Any]:
    """Returns the arrays of values in the dtypes that they were traced with."""
    return [
        as_dtype(value, dtype) if (dtype := float_dtype(atom.aval)) is not None else value.array
        for atom, value in zip(atoms, values, strict=True)
    ]


def bound_as_traced(equation: Equation, values: Sequence[CastValue]) -> list[CastValue]:
    return [CastValue(output) for output in bind(equation, as_traced(equation.invars, values))]


def traced_kind(variable: Any) -> CastValue:
    """Returns a value of the dtype that a variable was traced with."""
    return CastValue(variable.aval)


def fits(constant: Any, dtype: DTypeLike) -> bool:
    """Returns whether a number neither overflows nor vanishes in `dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.asarray(constant).astype(dtype)
    overflows = np.isinf(narrow) and not np.isinf(constant)
    vanishes = narrow == 0 and constant != 0
    return not (overflows or vanishes)


def saturates(constant: Any, dtype: DTypeLike) -> bool:
    """Returns whether a number overflows in `dtype` by rounding alone.

    For example, float32's lowest number becomes -inf in bfloat16.
    """
    finite = bool(np.isfinite(constant)) and has_range_of_float32(dtype)
    return finite and abs(float(constant)) > float(jnp.finfo(dtype).max)


def saturated(array: Any, dtype: DTypeLike) -> Any:
    """Casts `array` to `dtype`, clamped to its finite range."""
    limits = jnp.finfo(dtype)
    return cast(lax.clamp(array.dtype.type(limits.min), array, array.dtype.type(limits.max)), dtype)


def has_range_of_float32(dtype: DTypeLike) -> bool:
    return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(F32).maxexp)


def common_dtype(values: Sequence[CastValue], half: Any, *, selects: bool = False) -> np.dtype:
    """Returns the dtype for mixing float32 values of the trace: `half` or float32.

    It is `half` if one value is half already and every other yields: params and constants always,
    scalars, and weak values of the shape of a half one, if `half` has float32's range. A constant
    that overflows or vanishes in `half` keeps the operation in float32, except in an operation that
    `selects`, where the lowest number of `half` can replace a mask's `finfo(float32).min`.
    """
    shapes = [value.array.shape for value in values if value.dtype == half]
    if not shapes:
        return F32
    for value in values:
        if value.dtype == half:
            continue
        if _is_lost(value, half) and not (selects and saturates(value.constant, half)):
            return F32
        if not (value.yields or (_follows(value, shapes) and has_range_of_float32(half))):
            return F32
    return np.dtype(half)


def meets_tables(values: Sequence[CastValue], half: Any) -> bool:
    """Returns whether half-precision activations meet nothing that widens them.

    These are tables, scalars, and inputs of the shape of an activation. Mixed in float32, they make
    an activation, to be half precision for what reads it.
    """
    shapes = [value.array.shape for value in values if value.dtype == half]
    return bool(shapes) and all(
        value.dtype == half
        or (not _is_lost(value, half) and (_is_table(value) or _follows(value, shapes)))
        for value in values
    )


def makes_table(values: Sequence[CastValue], half: Any) -> bool:
    """Returns whether an operation on float32 values makes a table."""
    return all(_is_table(value) and not _is_lost(value, half) for value in values)


def is_input(values: Sequence[CastValue], half: Any) -> bool:
    """Returns whether an operation shifts or scales inputs of a module's call by tables."""
    return any(value.weak for value in values) and all(
        value.weak or (_is_table(value) and not _is_lost(value, half)) for value in values
    )


def _is_table(value: CastValue) -> bool:
    return value.is_table or value.yields


def _is_lost(value: CastValue, half: Any) -> bool:
    return value.constant is not None and not fits(value.constant, half)


def _follows(value: CastValue, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether a value that is no table follows half-precision ones of some shapes."""
    return value.array.ndim == 0 or (value.weak and value.array.shape in shapes)


def fits_in_range(array: Any, dtype: DTypeLike) -> bool:
    """Returns whether an array is known, and none of its finite numbers overflows in `dtype`.

    Returns False if all of its numbers vanish.
    """
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return False
    numbers = np.abs(np.asarray(array).astype(F32))
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    return not numbers.size or fits(numbers.max(), dtype)

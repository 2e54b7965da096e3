"""The values that autocast computes with, and the dtype of operations on them.

A value is an array with facts that decide its dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.functions.checkpointing import as_stored
from policy.programs.dtypes import F32, float_dtype, is_floating_dtype
from policy.programs.jaxprs import Equation, bind
from policy.programs.marks import AUTOCAST
from policy.quantized.array import QuantizedArray


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
      narrows: whether a normalization computed it in float32, to be half precision for other
        modules.
      narrowed: the half-precision value for other modules, once one has read it.
      widened: the same array in float32, once an operation has requested it.
      transposed: the value that this one is a transposition of, and its axes.
      is_shared: whether it is a half-precision param that several operations read, in float32.
      codes: what it was widened from, of a parameter that is stored in 8 or 4 bits.
      is_mask: whether it is made of numbers, bools and integers alone, as a one-hot array.
      is_tangent: whether it is computed from tangents of a derivative rule.
      is_picked: whether an operation picks elements of it, such as the label's logit. Then others
        must not read it unrounded, as XLA has them: their results and the elements may cancel.
      is_scaled: whether it is a product of an activation with a number that half precision rounds,
        or a sum of such products: others like it read it in float32.
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
    codes: QuantizedArray | None = None
    is_mask: bool = False
    is_tangent: bool = False
    is_picked: bool = False
    is_scaled: bool = False

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def is_float(self) -> bool:
        return is_floating_dtype(self.array.dtype)

    @property
    def is_half(self) -> bool:
        return self.is_float and self.dtype.itemsize < F32.itemsize

    def as_dtype(self, dtype: np.dtype) -> Any:
        """Returns the array in `dtype`.

        A half-precision value is widened once for all readers, so that its cotangents are summed in
        float32 and rounded once. A float32 value is narrowed at each use, for the same reason.
        """
        if self.dtype == dtype:
            return self.array
        if self.dtype.itemsize >= dtype.itemsize:
            if self.transposed is not None:
                # Cast, then transposed, as an author writes it: XLA folds a transposition that
                # stands beside a matmul into it, also the one of the gradient. Past a cast it
                # can't, and XLA:CPU then multiplies in another order.
                source, axes = self.transposed
                return lax.transpose(source.as_dtype(dtype), axes)
            return cast(self.array, dtype)
        if self.widened is None or self.widened.dtype != dtype:
            self.widened = cast(as_stored(self.array) if self.is_picked else self.array, dtype)
        return self.widened

    def widened_param(self) -> CastValue:
        """Returns a param in float32, so that its cotangents are summed there."""
        return CastValue(self.as_dtype(F32), yields=True)

    def narrowed_to(self, dtype: np.dtype) -> CastValue:
        """Returns the value as readers outside of its normalization get it, in a half `dtype`."""
        if not self.narrows or dtype == F32:
            return self
        if self.narrowed is None or self.narrowed.dtype != dtype:
            # One cast for all readers, as an author writes it: queries, keys and values would each
            # save a copy.
            self.narrowed = CastValue(cast(self.array, dtype))
        return self.narrowed

    def with_array(self, array: Any) -> CastValue:
        """Returns a value with the same facts about another array."""
        return dataclasses.replace(
            self, array=array, narrowed=None, widened=None, transposed=None, codes=None
        )


Values = list[CastValue]

Evaluated = tuple[str, Values]
"""The treatment of an equation, as reports name it, and its outputs."""


def cast(array: Any, dtype: DTypeLike | None) -> Any:
    """Casts `array` to `dtype`; returns it unchanged if it has that dtype, or `dtype` is None."""
    if dtype is None or array.dtype == dtype:
        return array
    with jax.named_scope(AUTOCAST):  # a cast that the author did not write: reports can tell
        return lax.convert_element_type(array, dtype)


def as_traced(atoms: Sequence[Any], values: Values) -> list[Any]:
    """Returns the arrays of values in the dtypes that they were traced with."""
    return [
        value.as_dtype(dtype) if (dtype := float_dtype(atom.aval)) is not None else value.array
        for atom, value in zip(atoms, values, strict=True)
    ]


def bound(
    equation: Equation, arrays: Sequence[Any], params: dict[str, Any] | None = None
) -> Values:
    """Evaluates an equation on arrays."""
    return list(map(CastValue, bind(equation, arrays, params)))


def bound_as_traced(equation: Equation, values: Values) -> Values:
    return bound(equation, as_traced(equation.invars, values))

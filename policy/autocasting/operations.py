"""Evaluates one equation that holds no program of its own, by its category and its operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.autocasting.broadcasting import (
    broadcast_product,
    is_broadcast,
    repeated,
    sums_cotangents,
    widened_operand,
)
from policy.autocasting.matmuls import computed
from policy.autocasting.report import OPAQUE_MATMUL
from policy.autocasting.settings import Place
from policy.autocasting.source_lines import is_of_activation
from policy.autocasting.values import CastValue, Evaluated, Values, bound, bound_as_traced, cast
from policy.functions.checkpointing import keeping_inputs
from policy.programs import primitives
from policy.programs.dtypes import F32, float_dtype, is_floating_dtype
from policy.programs.jaxprs import Equation, bind, programs_of, runs_any, subprograms
from policy.quantized import products

_CHOOSES = primitives.EXACT - primitives.COMPARISONS


@dataclasses.dataclass
class CastOperation:
    """An equation and its operands.

    Attributes:
      equation: the equation.
      category: the category of its primitive here.
      place: the dtypes there.
      narrows: whether tables meet half-precision activations without widening them.
      values: the operands, as it reads them.
    """

    equation: Equation
    category: str
    place: Place
    narrows: bool
    values: Values

    def __post_init__(self) -> None:
        self.given = self.values
        if not self.place.region and self.name != "add_any":
            self.values = self._read()

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @functools.cached_property
    def floats(self) -> Values:
        return [value for value in self.values if value.is_float]

    @property
    def is_of_params(self) -> bool:
        """True if it computes with parameters and constants alone."""
        return bool(self.floats) and all(value.yields for value in self.floats)

    def evaluated(self) -> Evaluated:
        """Returns the treatment, as reports name it, and the outputs."""
        floats, half = self.floats, self.place.compute
        done, outputs = self._treatment()()
        if not floats or (floats[0].is_mask and all(value.is_mask for value in floats)):
            for output in outputs:
                output.is_mask = True
        # A sum or root of activations in half, such as rows of a table, is no table.
        is_activation = self.category == "fp32" and any(v.is_half and not v.yields for v in floats)
        makes_table = all(_is_table(value) and not _is_lost(value, half) for value in floats)
        if self.narrows and makes_table and not is_activation:
            for output in outputs:
                output.is_table = True
        elif self.category == "promote" and is_input(floats, half):
            for output in outputs:
                output.weak = True
        return done, outputs

    def _treatment(self) -> Callable[[], Evaluated]:
        name, place, category = self.name, self.place, self.category
        if name == "convert_element_type":
            return self._converted
        traced = _dtypes((*self.equation.invars, *self.equation.outvars))
        if traced != {F32} and name in primitives.MOVES_COTANGENTS and self.values[0].yields:
            return self._moved
        if (traced != {F32} and not self._mixes_float32(traced)) or self._stays_as_traced():
            return functools.partial(self._as_traced, traced)
        if category == "compute":
            return functools.partial(computed, self.equation, self.values, place)
        if name == "add_any":
            return self._accumulated
        if place.compute == F32 or place.region or category == "fp32":
            follows = place.compute != F32 and not place.region and self._is_odd_power()
            return self._mixed if follows else self._wide
        if sums_cotangents(self.equation, self.values):
            return self._summed_backward
        return self._passed if category == "passthrough" else self._mixed

    # Operands -------------------------------------------------------------------------------------

    def _read(self) -> Values:
        """Returns the operands narrowed, except in sums with float32."""
        if self.category == "fp32" or not any(value.narrows for value in self.values):
            return self.values
        narrowed = [value.narrowed_to(self.place.compute) for value in self.values]
        if self.name in primitives.FORWARD_ADDITIONS and narrowed != self.values:
            floats = [value for value in narrowed if value.is_float]
            is_wide = common_dtype(floats, self.place.compute) == F32
            if is_wide and not self._meets_tables(floats):
                return self.values
        return narrowed

    def _meets_tables(self, floats: Values) -> bool:
        half = self.place.compute
        return self.narrows and half != F32 and meets_tables(floats, half)

    def _mixes_float32(self, traced: set[Any]) -> bool:
        """Returns whether a matmul multiplies float32 with half precision."""
        is_mixed = F32 in _dtypes(self.equation.invars) and {d.itemsize for d in traced} == {2, 4}
        return self.category == "compute" and is_mixed

    def _stays_as_traced(self) -> bool:
        """Returns whether an equation runs as traced, whatever its dtypes.

        So do matmuls with a complex operand or result; they may mix real and complex ones.
        """
        if self.category != "compute":
            return self.category in ("exempt", "opaque", "explicit", "control")
        atoms = (*self.equation.invars, *self.equation.outvars)
        dtypes = [getattr(atom.aval, "dtype", np.bool_) for atom in atoms]
        return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)

    def _is_odd_power(self) -> bool:
        """Returns whether a power can run in half precision.

        x**3, as in gelu, is two products. x**2 may be part of a variance.
        """
        power = self.equation.params.get("y") if self.name == "integer_pow" else None
        return power is not None and power > 2 and has_range_of_float32(self.place.compute)

    # Treatments -----------------------------------------------------------------------------------

    def _traced(self, **facts: Any) -> Values:
        """Returns the outputs in the dtypes of the trace, with facts about them."""
        outputs = bound_as_traced(self.equation, self.values)
        return [dataclasses.replace(output, **facts) for output in outputs] if facts else outputs

    def _as_traced(self, traced: set[Any]) -> Evaluated:
        if traced and traced != {F32}:
            return "author's dtypes", self._traced()
        is_opaque = self.category in ("opaque", "control")
        return opaque_kind(self.equation) if is_opaque else "as traced", self._traced()

    def _converted(self) -> Evaluated:
        """Obeys the author's own cast."""
        done, value = "author's cast", self.values[0]
        source = float_dtype(self.equation.invars[0].aval)
        target = np.dtype(self.equation.params["new_dtype"])
        if source == target == F32:
            return done, [value]
        output = cast(value.array, target)
        if source is not None or not is_floating_dtype(target):
            is_param = value.yields and value.constant is None and is_floating_dtype(target)
            return done, [CastValue(output, yields=is_param and target.itemsize < F32.itemsize)]
        # A mask of zeros and ones is exact in any dtype; positions and counts are not.
        is_constant = value.constant is not None
        constant = np.asarray(value.constant).astype(target)[()] if is_constant else None
        yields = value.dtype == np.bool_ or is_constant
        return done, [CastValue(output, yields=yields, constant=constant)]

    def _moved(self) -> Evaluated:
        outputs = bind(self.equation, [value.array for value in self.values])
        return "author's dtypes", [CastValue(output, yields=True) for output in outputs]

    def _accumulated(self) -> Evaluated:
        """Returns the sum of two cotangents in float32.

        Further sums read it in float32. Other operations read it narrowed, if both operands are
        half precision or may be narrowed themselves.
        """
        is_half = self.place.region == "applies" or all(
            value.narrows or value.dtype == self.place.compute != F32 for value in self.values
        )
        return "float32", self._traced(narrows=is_half)

    def _wide(self) -> Evaluated:
        if self.place.region == "applies" and not self.is_of_params:
            return "float32, read in half", self._traced(narrows=True)
        return "float32", self._traced(yields=self.is_of_params)

    def _summed_backward(self) -> Evaluated:
        if self.values[0].yields and self.name in primitives.BROADCASTS:
            self.values = [self.values[0].widened_param(), *self.values[1:]]
            return self._passed()
        return "widened, then cast", widened_operand(self.equation, self.values)

    def _passed(self) -> Evaluated:
        """Moves numbers in the dtype that they have."""
        if subprograms(self.equation):  # whose dtypes are fixed
            return "as traced", self._traced()
        value, place = self.values[0], self.place
        is_param = value.yields and value.constant is None
        if is_param and self.narrows and _is_lookup(self.equation):
            if value.codes is not None and (rows := _rows(self.equation, self.values)) is not None:
                return "looked up, then cast", [CastValue(cast(rows, place.compute))]
            (rows,) = bind(self.equation, [value.array for value in self.values])
            return "looked up, then cast", [CastValue(cast(rows, place.compute))]
        outputs = self._bound([value.array for value in self.values])
        if self.name == "transpose" and is_param:
            axes = tuple(self.equation.params["permutation"])
            outputs = [CastValue(outputs[0].array, yields=True, transposed=(value, axes))]
            return "operand dtype", outputs
        if len(self.values) == len(outputs):
            sources = self.values
        elif len(self.floats) == 1:
            sources = self.floats * len(outputs)
        else:
            return "operand dtype", outputs
        keeps = self.name in primitives.KEEPS_CONSTANTS
        for output, source in zip(outputs, sources, strict=True):
            output.yields = source.yields and (keeps or not _is_lost(source, place.compute))
            output.constant, output.weak = source.constant if keeps else None, source.weak
            # Pooling compares numbers of its own dtype alone.
            output.is_picked = source.is_picked and not self.name.startswith("reduce_window")
        return "operand dtype", outputs

    def _mixed(self) -> Evaluated:
        """Computes in half precision if nothing keeps it in float32."""
        if subprograms(self.equation) or not self.floats:  # one holds `x.at[i].apply`
            return "as traced", self._traced()
        half = self.place.compute
        if self.is_of_params:
            return "float32", self._traced(
                yields=not any(_is_lost(value, half) for value in self.floats)
            )
        dtype = common_dtype(self.floats, half, selects=self.name == "select_n")
        if dtype == F32 and self._meets_tables(self.floats):
            if self.name not in _CHOOSES:
                is_float = bool(_dtypes(self.equation.outvars))
                return "float32, read in half", self._traced(narrows=is_float)
            dtype = half  # rounded now or afterwards, the numbers are the same
        if dtype != F32 and self._scales():
            return "float32, read in half", self._scaled()
        result: Any = self.equation.outvars[0].aval if self.name in primitives.NARY else None
        arrays = [self._operand(value, dtype, result) for value in self.values]
        is_product = self.name in primitives.PRODUCTS and dtype != F32
        if is_product and any(is_broadcast(value, result.shape) for value in self.values):
            return str(dtype), broadcast_product(self.equation, self.values, arrays, dtype)
        return str(dtype), self._bound(arrays)

    def _scales(self) -> bool:
        """Returns whether activations are multiplied or divided by a number that would be rounded,
        and all of them be off by one factor, or are a sum of such products; not in `jax.nn`.
        """
        if self.name in primitives.FORWARD_ADDITIONS:
            return any(value.is_scaled for value in self.given)
        half = self.place.compute
        numbers = [v.constant for v in self.values if v.is_mask and v.yields and not v.array.ndim]
        is_rounded = self.name in primitives.PRODUCTS and any(
            number is None or np.asarray(number).astype(half) != number for number in numbers
        )
        return is_rounded and not is_of_activation(self.equation)

    def _scaled(self) -> Values:
        """Returns the product or sum in float32, to be half precision for what reads it.

        Its residuals are numbers; those of a number's quotient are activations in half precision.
        """
        if self.name == "div" and self.values[0].yields:
            number, x = self.values
            quotient = keeping_inputs(lambda x: lax.div(number.as_dtype(F32), cast(x, F32)))
            return [CastValue(quotient(x.array), narrows=True)]
        pairs = zip(self.given, self.values, strict=True)
        self.values = [given if given.is_scaled else value for given, value in pairs]
        return self._traced(narrows=True, is_scaled=True)

    def _operand(self, value: CastValue, dtype: np.dtype, result: Any) -> Any:
        """Returns the array of a value in the dtype of an elementwise operation.

        It is broadcast in float32, so that its cotangent is summed there.
        """
        if not value.is_float:
            return value.array
        if value.constant is not None and saturates(value.constant, dtype):
            return saturated(value.array, dtype)
        shape = None if result is None else result.shape
        if dtype == F32 or self.name in primitives.PRODUCTS or not is_broadcast(value, shape):
            return value.as_dtype(dtype)
        activations = (v.array for v in self.floats if v.dtype == dtype and not v.yields)
        return repeated(value.as_dtype(F32), result, dtype, next(activations, None))

    def _bound(self, arrays: Sequence[Any]) -> Values:
        try:
            return bound(self.equation, arrays)
        except (TypeError, NotImplementedError):  # the primitive takes no half precision
            return self._traced()


def _is_lookup(equation: Equation) -> bool:
    """Returns whether an equation reads rows of a table, not single numbers, such as the logits of
    labels, nor all there is along an axis of size 1.
    """
    if equation.primitive.name != "gather":
        return False
    shape, numbers = equation.invars[0].aval.shape, equation.params["dimension_numbers"]
    chooses = any(shape[axis] > 1 for axis in numbers.start_index_map)
    return chooses and max(equation.params["slice_sizes"]) > 1


def _rows(equation: Equation, values: Values) -> Any:
    """Returns rows of a table that is stored in 8 or 4 bits; None of another kind of lookup."""
    table, numbers = values[0].codes, equation.params["dimension_numbers"]
    index, rank = values[1].array, equation.outvars[0].aval.ndim
    assert table is not None
    is_of_rows = numbers.start_index_map == numbers.collapsed_slice_dims == (0,)
    is_whole = tuple(equation.params["slice_sizes"][1:]) == table.shape[1:]
    places = tuple(range(rank - table.ndim + 1, rank))
    if not (is_of_rows and is_whole and tuple(numbers.offset_dims) == places):
        return None
    if numbers.operand_batching_dims or index.ndim != rank - table.ndim + 2:
        return None
    tokens = index[..., 0]
    if equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        tokens = jnp.clip(tokens, 0, table.shape[0] - 1)
    return products.rows(table, tokens)


def opaque_kind(equation: Equation) -> str:
    """Returns the word of reports for an equation that is left as it was traced."""
    has_matmul = any(runs_any(program, primitives.MATMULS) for program in programs_of(equation))
    return OPAQUE_MATMUL if has_matmul else "opaque"


def _dtypes(atoms: Sequence[Any]) -> set[Any]:
    return {dtype for atom in atoms if (dtype := float_dtype(atom.aval)) is not None}


# --------------------------------------------------------------------------------------------------
# Half precision and float32 in one operation: tables, numbers and constants
# --------------------------------------------------------------------------------------------------


def fits(constant: Any, dtype: DTypeLike) -> bool:
    """Returns whether `dtype` holds a number with all its digits: no infinity for a finite number,
    and no zero or subnormal number, whose reciprocal may overflow, for another one.
    """
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.asarray(constant).astype(dtype)
    is_normal = abs(narrow) >= jnp.finfo(dtype).tiny or constant == 0 or np.isnan(constant)
    return bool(np.isinf(narrow) == np.isinf(constant) and is_normal)


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


def common_dtype(values: Values, half: Any, *, selects: bool = False) -> np.dtype:
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


def meets_tables(values: Values, half: Any) -> bool:
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


def is_input(values: Values, half: Any) -> bool:
    """Returns whether an operation shifts or scales inputs of a module's call by tables."""
    return any(value.weak for value in values) and all(
        value.weak or (_is_table(value) and not _is_lost(value, half)) for value in values
    )


def _is_table(value: CastValue) -> bool:
    return value.is_table or value.yields


def _is_lost(value: CastValue, half: Any) -> bool:
    return value.constant is not None and not fits(value.constant, half)


def _follows(value: CastValue, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether a value that is no table follows half-precision ones of some shapes.

    A number follows arrays, but not numbers: it may be a running sum of them.
    """
    is_factor = value.array.ndim == 0 and any(shapes)
    return is_factor or (value.weak and value.array.shape in shapes)


def fits_in_range(array: Any, dtype: DTypeLike) -> bool:
    """Returns whether an array is known, and none of its finite numbers overflows in `dtype`.

    Returns False if all of its numbers vanish.
    """
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return False
    numbers = np.abs(np.asarray(array).astype(F32))
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    return not numbers.size or fits(numbers.max(), dtype)

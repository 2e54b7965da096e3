"""Evaluates one equation that holds no program of its own, by its category and its operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.autocasting.broadcasting import (
    broadcast_product,
    is_broadcast,
    repeated,
    sums_cotangents,
    widened_operand,
)
from policy.autocasting.report import OPAQUE_MATMUL
from policy.autocasting.settings import Place
from policy.autocasting.values import (
    CastValue,
    Evaluated,
    as_dtype,
    as_traced,
    bound_as_traced,
    cast,
    common_dtype,
    fits,
    floats_of,
    has_range_of_float32,
    is_input,
    makes_table,
    meets_tables,
    saturated,
    saturates,
    widened_param,
)
from policy.core.precision import canonical_precision
from policy.eight_bits import scaled_convolution, scaled_matmul
from policy.programs.dtypes import F32, explicit_sharding, float_dtype, is_floating_dtype
from policy.programs.jaxprs import Equation, bind, programs_of, runs_any
from policy.programs.primitives import (
    BROADCASTS,
    COMPARISONS,
    EXACT,
    FORWARD_ADDITIONS,
    KEEPS_CONSTANTS,
    MATMULS,
    MOVES_COTANGENTS,
    NARY,
    PRODUCTS,
)

_CHOOSES = EXACT - COMPARISONS


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
    values: list[CastValue]

    def __post_init__(self) -> None:
        if not self.place.region and self.name != "add_any":
            self.values = self._read()

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @functools.cached_property
    def floats(self) -> list[CastValue]:
        return floats_of(self.values)

    @property
    def is_of_params(self) -> bool:
        """True if it computes with parameters and constants alone."""
        return bool(self.floats) and all(value.yields for value in self.floats)

    def evaluated(self) -> Evaluated:
        """Returns the treatment, as reports name it, and the outputs."""
        floats, half = self.floats, self.place.compute
        done, outputs = self._treatment()()
        if self.narrows and makes_table(floats, half):
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
        traced = {*_dtypes(self.equation.invars), *_dtypes(self.equation.outvars)}
        if traced != {F32} and name in MOVES_COTANGENTS and self.values[0].yields:
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

    def _read(self) -> list[CastValue]:
        """Returns the operands narrowed, except in sums with float32."""
        if self.category == "fp32":
            return self.values
        narrowed = [value.narrowed_to(self.place.compute) for value in self.values]
        if self.name in FORWARD_ADDITIONS and narrowed != self.values:
            floats = floats_of(narrowed)
            is_wide = common_dtype(floats, self.place.compute) == F32
            if is_wide and not self._meets_tables(floats):
                return self.values
        return narrowed

    def _meets_tables(self, floats: Sequence[CastValue]) -> bool:
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

    def _traced(self, **facts: Any) -> list[CastValue]:
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
        if self.is_of_params:
            return "float32", self._traced(yields=True)
        if self.place.region == "applies":
            return "float32, read in half", self._traced(narrows=True)
        return "float32", self._traced()

    def _summed_backward(self) -> Evaluated:
        if self.values[0].yields and self.name in BROADCASTS:
            self.values = [widened_param(self.values[0]), *self.values[1:]]
            return self._passed()
        return "widened, then cast", widened_operand(self.equation, self.values)

    def _passed(self) -> Evaluated:
        """Moves numbers in the dtype that they have."""
        if _holds_program(self.equation):
            return "as traced", self._traced()
        value, place = self.values[0], self.place
        is_param = value.yields and value.constant is None
        if self.name == "gather" and is_param and value.array.ndim and self.narrows:
            looked_up = bind(self.equation, [value.array for value in self.values])
            rows = [CastValue(cast(output, place.compute)) for output in looked_up]
            return "looked up, then cast", rows
        outputs = self._bound([value.array for value in self.values])
        if self.name == "transpose" and is_param:
            axes = tuple(self.equation.params["permutation"])
            moved = CastValue(outputs[0].array, yields=True, transposed=(value, axes))
            return "operand dtype", [moved]
        if len(self.values) == len(outputs):
            sources = self.values
        elif len(self.floats) == 1:
            sources = self.floats * len(outputs)
        else:
            return "operand dtype", outputs
        keeps = self.name in KEEPS_CONSTANTS
        return "operand dtype", [
            CastValue(
                output.array,
                source.yields and (keeps or _fits(source, place.compute)),
                source.constant if keeps else None,
                weak=source.weak,
            )
            for output, source in zip(outputs, sources, strict=True)
        ]

    def _mixed(self) -> Evaluated:
        """Computes in half precision if nothing keeps it in float32."""
        if _holds_program(self.equation) or not self.floats:
            return "as traced", self._traced()
        half = self.place.compute
        if self.is_of_params:
            return "float32", self._traced(yields=all(_fits(value, half) for value in self.floats))
        dtype = common_dtype(self.floats, half, selects=self.name == "select_n")
        if dtype == F32 and self._meets_tables(self.floats):
            if self.name not in _CHOOSES:
                outputs = self._traced()
                for output in outputs:
                    output.narrows = is_floating_dtype(output.dtype)
                return "float32, read in half", outputs
            dtype = half  # rounded now or afterwards, the numbers are the same
        shape = self.equation.outvars[0].aval.shape if self.name in NARY else None
        arrays = [self._operand(value, dtype, shape) for value in self.values]
        is_product = self.name in PRODUCTS and dtype != F32
        if is_product and any(is_broadcast(value, shape) for value in self.values):
            return str(dtype), broadcast_product(self.equation, self.values, arrays, dtype)
        return str(dtype), self._bound(arrays)

    def _operand(self, value: CastValue, dtype: np.dtype, shape: tuple[int, ...] | None) -> Any:
        """Returns the array of a value in the dtype of an elementwise operation.

        It is broadcast in float32, so that its cotangent is summed there.
        """
        if not is_floating_dtype(value.dtype):
            return value.array
        if value.constant is not None and saturates(value.constant, dtype):
            return saturated(value.array, dtype)
        if dtype == F32 or self.name in PRODUCTS or shape is None or not is_broadcast(value, shape):
            return as_dtype(value, dtype)
        return repeated(
            as_dtype(value, F32), shape, dtype, explicit_sharding(self.equation.outvars[0].aval)
        )

    def _bound(self, arrays: Sequence[Any]) -> list[CastValue]:
        try:
            return [CastValue(output) for output in bind(self.equation, arrays)]
        except (TypeError, NotImplementedError):  # the primitive takes no half precision
            return self._traced()


def opaque_kind(equation: Equation) -> str:
    """Returns the word of reports for an equation that is left as it was traced."""
    has_matmul = any(runs_any(program, MATMULS) for program in programs_of(equation))
    return OPAQUE_MATMUL if has_matmul else "opaque"


def _dtypes(atoms: Sequence[Any]) -> set[Any]:
    return {dtype for atom in atoms if (dtype := float_dtype(atom.aval)) is not None}


def _holds_program(equation: Equation) -> bool:
    """Returns whether an equation holds a program, whose dtypes are fixed.

    One is the scatter of `x.at[i].apply`.
    """
    return any(True for _ in programs_of(equation))


def _fits(value: CastValue, dtype: np.dtype) -> bool:
    return value.constant is None or fits(value.constant, dtype)


def computed(equation: Equation, values: Sequence[CastValue], place: Place) -> Evaluated:
    """Evaluates a matmul or convolution with its operands and result in compute_dtype."""
    if _is_outer_product(equation, values):
        return "float32", [_outer_product(equation, values)]
    params, dtype = dict(equation.params), place.compute
    precision = params.get("precision")
    is_algorithm = precision is not None and not isinstance(precision, (tuple, list, lax.Precision))
    if is_algorithm:  # the algorithm names the dtypes of its operands
        return "author's algorithm", bound_as_traced(equation, values)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if precision is None and place.precision is not None:
        params["precision"] = canonical_precision(place.precision)
    arrays = [
        as_dtype(value, dtype) if is_floating_dtype(value.dtype) else value.array
        for value in values
    ]
    weights = [side for side, value in enumerate(values) if value.yields]
    by = place.matmul if len(weights) == 1 else None
    if by is not None and _may_be_scaled(equation, arrays, weights[0]):
        product = _scaled(equation, arrays, by, weights[0], dtype)
        return str(by.operands), [CastValue(cast(product, dtype))]
    return str(dtype), [CastValue(output) for output in bind(equation, arrays, params)]


def _is_outer_product(equation: Equation, values: Sequence[CastValue]) -> bool:
    """Returns whether an equation multiplies tables, such as positions and frequencies, as a dot
    without a contraction.
    """
    return (
        equation.primitive.name == "dot_general"
        and not any(equation.params["dimension_numbers"][0])
        and equation.params.get("out_sharding") is None
        and all(value.is_table or value.yields for value in values)
    )


def _outer_product(equation: Equation, values: Sequence[CastValue]) -> CastValue:
    """Evaluates a dot without a contraction as a multiplication, which no device rounds."""
    batch = equation.params["dimension_numbers"][1]
    a, b = (
        jnp.moveaxis(array, axes, range(len(axes)))
        for array, axes in zip(as_traced(equation.invars, values), batch, strict=True)
    )
    shared, rank = len(batch[0]), equation.outvars[0].aval.ndim
    a = lax.expand_dims(a, range(a.ndim, rank))
    b = lax.expand_dims(b, range(shared, shared + rank - b.ndim))
    return CastValue(lax.mul(*jnp.broadcast_arrays(a, b)))


# --------------------------------------------------------------------------------------------------
# 8 bits
# --------------------------------------------------------------------------------------------------


def _may_be_scaled(equation: Equation, arrays: Sequence[Any], weight: int) -> bool:
    """Returns whether a matmul or convolution runs in 8 bits, of which one operand is a parameter.

    Those of a backward pass that was traced do not: backward of operations in 8 bits has its own.

    Args:
      arrays: the operands.
      weight: the operand that is a parameter, by index.
    """
    name, params = equation.primitive.name, equation.params
    is_one = name == "dot_general" or (
        name == "conv_general_dilated"
        and weight == 1
        and scaled_convolution.may_run_in_8_bits(arrays[0], arrays[1], params["batch_group_count"])
    )
    return (
        is_one
        and params.get("out_sharding") is None
        and "transpose(" not in str(equation.source_info.name_stack)
    )


def _scaled(
    equation: Equation,
    arrays: Sequence[Any],
    by: scaled_matmul.ScaledMatmul,
    weight: int,
    dtype: np.dtype,
) -> jax.Array:
    """Returns the result of a matmul in 8 bits in `dtype`, or of a convolution in float32."""
    if equation.primitive.name == "conv_general_dilated":
        options = {name: equation.params[name] for name in scaled_convolution.OPTIONS}
        return scaled_convolution.scaled_conv(arrays[0], arrays[1], by, **options)
    return scaled_matmul.scaled_dot_general(
        arrays[0],
        arrays[1],
        equation.params["dimension_numbers"],
        by,
        weight="rhs" if weight else "lhs",
        dtype=dtype,
    )

"""Emulates half precision in float32, with rounding controlled by flags.

Rounding is a conversion to the half dtype and back. It overflows, underflows and keeps subnormals
as the dtype does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.suggest.eight_bits import ScaledDots
from policy.programs.dtypes import F32, holds_half, is_half
from policy.programs.jaxprs import Equation, bind
from policy.programs.paths import Path
from policy.programs.primitives import ACCUMULATES, EXACT, MATMULS, category_of
from policy.programs.rewriting.upcast import (
    NO_REFERENCE,
    ModulePass,
    PlacedValue,
    Reference,
    Upcast,
    bound_wide,
    dtype_of,
    narrowed,
    widen,
)


class Flags(NamedTuple):
    """The parts of a program that run in another precision.

    Attributes:
      wide: which candidates run in float32. The first is for paths that no rule reaches.
      promotes: whether operations promote; otherwise half precision stays half when mixed with
        float32, as in modules that cast their inputs.
      in_8_bits: which layers of `ScaledDots` run in 8 bits, after one that is False.
    """

    wide: Any
    promotes: Any
    in_8_bits: Any = False


class Emulated(Upcast):
    """Runs a program in float32, with values rounded where its flags say so.

    A value is an array in float32. If it may be half precision in the program, a second array tells
    whether it is in float32.

    Attributes:
      flags: the parts in another precision.
      candidates: the index of each path in the flags.
      scaled: the matmuls that may run in 8 bits; None for none.
      is_native: whether half precision runs in its own dtype instead of rounded float32.
    """

    def __init__(
        self,
        flags: Flags,
        candidates: Mapping[Path, int],
        reference: Reference = NO_REFERENCE,
        scaled: ScaledDots | None = None,
        is_native: bool = False,
    ):
        super().__init__(reference=reference)
        self.flags, self.candidates = flags, candidates
        self.scaled, self.is_native = scaled, is_native
        self._layers = {path: i + 1 for i, path in enumerate(scaled.layers if scaled else ())}

    def evaluated(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        atoms = (*equation.invars, *equation.outvars)
        if not any(holds_half(atom.aval) for atom in atoms):
            return super().evaluated(equation, values)
        # Operands mixed with float32 are promoted, as in JAX. Matmuls and casts follow the rules.
        name, is_wide = equation.primitive.name, self._is_wide(equation, values)
        dtypes = [dtype_of(atom) for atom in equation.invars]
        arrays = [widen(value.arrays[0]) for value in values]
        if any(len(value.arrays) > 1 for value in values):
            own = self.flag(self.place_of(equation))
            stays = own if _decides(equation) else own | self.flags.promotes
            arrays = [rounded(a, d, stays) for a, d in zip(arrays, dtypes, strict=True)]
        outputs = bound_wide(equation, arrays)
        if self.scaled is not None and id(equation) in self.scaled.cotangents:
            layer = candidate_of(self.place_of(equation).path, self._layers)
            product = self.scaled.product(equation, arrays)
            outputs = [jnp.where(self.flags.in_8_bits[layer], product, outputs[0])]
        # Some backends sum these in half precision, unlike a float32 sum that is rounded.
        if self.is_native or name in ACCUMULATES:
            narrow = bind(equation, [narrowed(a, d) for a, d in zip(arrays, dtypes, strict=True)])
            both = zip(outputs, map(widen, narrow), strict=True)
            outputs = [jnp.where(is_wide, wide, narrow) for wide, narrow in both]
        elif name not in EXACT:
            made = zip(outputs, map(dtype_of, equation.outvars), strict=True)
            outputs = [rounded(output, dtype, is_wide) for output, dtype in made]
        return [
            PlacedValue([output, is_wide] if holds_half(variable.aval) else [output])
            for output, variable in zip(outputs, equation.outvars, strict=True)
        ]

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        """Returns the operands, with unrounded constants if the other operands are in float32."""
        is_wide, values = self._is_wide(equation, values), list(values)
        for k, array in found.items():
            own, *flag = values[k].arrays
            values[k] = PlacedValue([jnp.where(is_wide, array, widen(own)), *flag])
        return values

    def _is_wide(self, equation: Equation, values: Sequence[PlacedValue]) -> Any:
        """Returns whether an equation runs in float32, by its place and by its operands."""
        is_wide = self.flag(self.place_of(equation))
        if not _decides(equation):
            for flag in [value.arrays[1] for value in values if len(value.arrays) > 1]:
                is_wide = is_wide | (flag & self.flags.promotes)
        return is_wide

    def flag(self, place: ModulePass) -> Any:
        """Returns whether a place runs in float32."""
        return self.flags.wide[candidate_of(place.path, self.candidates)]

    # Loops and branches return the dtypes of their variables --------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        flag = self.flag(self.place_of(equation))
        return [PlacedValue([None], (dtype_of(variable), flag)) for variable in equation.outvars]

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        dtype, flag = like.origin
        array = widen(value.arrays[0])
        return PlacedValue([array if len(value.arrays) == 1 else rounded(array, dtype, flag)])


def rounded(array: Any, dtype: DTypeLike, unless: Any) -> Any:
    """Returns a float32 array rounded to a half dtype, unless a flag is set.

    Any other array or dtype is left unchanged.
    """
    if not is_half(dtype) or array.dtype != F32:
        return array
    half = lax.convert_element_type(array, dtype)
    return jnp.where(unless, array, lax.convert_element_type(half, array.dtype))


def _decides(equation: Equation) -> bool:
    """Returns whether the dtypes of an equation do not depend on those of its operands."""
    name = equation.primitive.name
    if name == "convert_element_type":
        return is_half(equation.params["new_dtype"])
    return name in MATMULS or category_of(name) in ("opaque", "explicit", None)


def candidate_of(path: Path, candidates: Mapping[Path, int]) -> int:
    """Returns the index in the flags of the innermost candidate above a path, or 0."""
    for length in range(len(path), 0, -1):
        if path[:length] in candidates:
            return candidates[path[:length]]
    return 0

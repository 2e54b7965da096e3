"""Emulates half precision in float32, with rounding controlled by flags.

Rounding is a conversion to the half dtype and back. It overflows, underflows and keeps subnormals
as the dtype does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.suggest.scaled_dots import ScaledDots
from policy.programs.paths import Path
from policy.programs.placed_interpreter import (
    NO_REFERENCE,
    ModulePass,
    PlacedValue,
    Reference,
)
from policy.programs.primitives import ACCUMULATES, EXACT, MATMULS, category_of
from policy.programs.protocols import Equation
from policy.programs.subprograms import bind
from policy.programs.upcast import (
    Upcast,
    bound_wide,
    dtype_of,
    is_half,
    narrowed,
    wide_dtype,
    widen,
)


class Emulated(Upcast):
    """Runs a program in float32, with values rounded where its flags say so.

    A value is an array in float32. If it may be half precision in the program, a second array tells
    whether it is in float32.

    Attributes:
      flags: a vector of booleans: which candidates run in float32. The first is for paths that no
        rule reaches. The last tells whether operations promote; otherwise half precision stays
        half when mixed with float32, as in modules that cast their inputs.
      candidates: the index of each path in the flags.
      scaled: the matmuls that run in 8 bits where `in_8_bits` says so; None for none.
      in_8_bits: a vector of booleans: of each layer of `scaled`, after one that is False.
    """

    def __init__(
        self,
        flags: Any,
        candidates: Mapping[Path, int],
        reference: Reference = NO_REFERENCE,
        scaled: ScaledDots | None = None,
        in_8_bits: Any = None,
    ):
        super().__init__(reference=reference)
        self.flags, self.candidates = flags, candidates
        self.scaled, self.in_8_bits = scaled, in_8_bits
        self._layers = {path: i + 1 for i, path in enumerate(scaled.layers if scaled else ())}

    def evaluated(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        atoms = (*equation.invars, *equation.outvars)
        if not any(is_half(dtype) for dtype in map(dtype_of, atoms) if dtype is not None):
            return super().evaluated(equation, values)
        return self._half(equation, values)

    def _half(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        """Evaluates an equation with half operands or results.

        Operands mixed with float32 are promoted, as in JAX. Matmuls and casts follow the rules.
        """
        name, is_wide = equation.primitive.name, self._is_wide(equation, values)
        dtypes = [dtype_of(atom) for atom in equation.invars]
        arrays = [widen(value.arrays[0]) for value in values]
        if any(len(value.arrays) > 1 for value in values):
            own = self.flag(self.place_of(equation))
            stays = own if _decides(equation) else own | self.flags[-1]
            arrays = [rounded(a, d, stays) for a, d in zip(arrays, dtypes, strict=True)]
        outputs = bound_wide(equation, arrays)
        if self.scaled is not None and id(equation) in self.scaled.cotangents:
            layer = candidate_of(self.place_of(equation).path, self._layers)
            product = self.scaled.product(equation, arrays)
            outputs = [jnp.where(self.in_8_bits[layer], product, outputs[0])]
        # Some backends sum these in half precision, unlike a float32 sum that is rounded.
        if name in ACCUMULATES:
            narrow = bind(equation, [narrowed(a, d) for a, d in zip(arrays, dtypes, strict=True)])
            outputs = [
                jnp.where(is_wide, o, widen(n)) for o, n in zip(outputs, narrow, strict=True)
            ]
        elif name not in EXACT:
            outputs = [
                rounded(o, dtype_of(v), is_wide)
                for o, v in zip(outputs, equation.outvars, strict=True)
            ]
        halves = [dtype is not None and is_half(dtype) for dtype in map(dtype_of, equation.outvars)]
        return [
            PlacedValue([o, is_wide] if half else [o])
            for o, half in zip(outputs, halves, strict=True)
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
                is_wide = is_wide | (flag & self.flags[-1])
        return is_wide

    def flag(self, place: ModulePass) -> Any:
        """Returns whether a place runs in float32."""
        return self.flags[candidate_of(place.path, self.candidates)]

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
    if dtype is None or not is_half(dtype) or array.dtype != wide_dtype(dtype):
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


class Ruled(Upcast):
    """Runs a program with some paths in float32, and the others in their traced dtypes.

    Each value is one array.
    """

    def __init__(
        self,
        wide: frozenset[Path],
        candidates: Mapping[Path, int],
        reference: Reference,
    ):
        super().__init__(reference=reference)
        self.wide, self.candidates = wide, candidates
        self._places = {index: path for path, index in candidates.items()}

    def is_wide(self, place: ModulePass) -> bool:
        """Returns whether a place runs in float32."""
        return self._places.get(candidate_of(place.path, self.candidates)) in self.wide

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        if not self.is_wide(self.place_of(equation)):
            return list(values)
        return super().with_constants(equation, values, found)

    def evaluated(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        if self.is_wide(self.place_of(equation)):
            return super().evaluated(equation, values)
        operands = [
            narrowed(value.arrays[0], dtype_of(atom))
            for value, atom in zip(values, equation.invars, strict=True)
        ]
        return [PlacedValue([output]) for output in bind(equation, operands)]

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        return [PlacedValue([None], dtype_of(variable)) for variable in equation.outvars]

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        return PlacedValue([narrowed(value.arrays[0], like.origin)])

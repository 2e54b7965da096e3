"""Emulates half precision in float32, with rounding controlled by flags.

Rounding is a conversion to the half dtype and back. It overflows, underflows and keeps subnormals
as the dtype does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from policy.inspect.suggest.scaled_dots import ScaledDots
from policy.programs.control_flow import handler_of
from policy.programs.paths import Path
from policy.programs.placed_interpreter import ModulePass, PlacedInterpreter, PlacedValue
from policy.programs.primitives import ACCUMULATES, EXACT, HOST, MATMULS, category_of
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


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The matmuls that run in 8 bits where a flag says so.

    Attributes:
      dots: these matmuls.
      layers: the index of each path in the flags.
      flags: a vector of booleans. The first is False.
    """

    dots: ScaledDots
    layers: Mapping[Path, int]
    flags: Any

    def flag(self, equation: Equation, place: ModulePass) -> Any:
        """Returns the flag of a matmul; None if it never runs in 8 bits."""
        if id(equation) not in self.dots.cotangents:
            return None
        index = candidate_of(place.path, self.layers)
        return self.flags[index] if index else None


class Emulated(Upcast):
    """Runs a program in float32, with values rounded where its flags say so.

    A value is an array in float32. If it may be half precision in the program, a second array tells
    whether it is in float32.

    Attributes:
      flags: a vector of booleans: which candidates run in float32. The first is for paths that no
        rule reaches. The last tells whether operations promote; otherwise half precision stays
        half when mixed with float32, as in modules that cast their inputs.
      candidates: the index of each path in the flags.
      scaled: the matmuls that run in 8 bits where their own flags say so.
    """

    def __init__(self, flags: Any, candidates: Mapping[Path, int]):
        super().__init__()
        self.flags, self.candidates = flags, candidates
        self.scaled: Scaled | None = None

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        if equation.primitive.name in HOST and not equation.outvars:
            return []
        atoms = (*equation.invars, *equation.outvars)
        if not any(is_half(dtype) for dtype in map(dtype_of, atoms) if dtype is not None):
            return [
                PlacedValue([output])
                for output in bound_wide(equation, [value.arrays[0] for value in values])
            ]
        return self._half(equation, values)

    def _half(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        """Evaluates an equation with half operands or results.

        Operands mixed with float32 are promoted, as in JAX. Matmuls and casts follow the rules.
        """
        name, is_wide = equation.primitive.name, self.flag(self.place_of(equation))
        promotes = self.flags[-1]
        decides = _decides(equation)
        given = [value.arrays[1] for value in values if len(value.arrays) > 1]
        own = is_wide
        if not decides:
            for flag in given:
                is_wide = is_wide | (flag & promotes)
        dtypes = [dtype_of(atom) for atom in equation.invars]
        arrays = [widen(value.arrays[0]) for value in values]
        if given:
            stays = own if decides else own | promotes
            arrays = [rounded(a, d, stays) for a, d in zip(arrays, dtypes, strict=True)]
        outputs = bound_wide(equation, arrays)
        place = self.place_of(equation)
        in_8_bits = None if self.scaled is None else self.scaled.flag(equation, place)
        if self.scaled is not None and in_8_bits is not None:
            product = self.scaled.dots.product(equation, arrays)
            outputs = [jnp.where(in_8_bits, product, outputs[0])]
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

    def given(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        """Returns the operands, with unrounded constants if the other operands are in float32."""
        wide = {} if self.lane is None else dict(self.lane.given(self.chain, equation))
        if not wide:
            return values
        is_wide = self.flag(self.place_of(equation))
        if not _decides(equation):
            for flag in [value.arrays[1] for value in values if len(value.arrays) > 1]:
                is_wide = is_wide | (flag & self.flags[-1])
        for k, array in wide.items():
            own, *flag = values[k].arrays
            values[k] = PlacedValue([jnp.where(is_wide, array, widen(own)), *flag])
        return values

    def replaced(self, place: ModulePass, value: PlacedValue, array: Any) -> PlacedValue:
        own, *flag = value.arrays
        return PlacedValue([jnp.where(flag[0] if flag else self.flag(place), array, own), *flag])

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


class Ruled(PlacedInterpreter):
    """Runs a program with some paths in float32, and the others in their traced dtypes.

    Each value is one array.
    """

    def __init__(self, wide: frozenset[Path], candidates: Mapping[Path, int]):
        super().__init__()
        self.wide, self.candidates = wide, candidates
        self._places = {index: path for path, index in candidates.items()}

    def is_wide(self, place: ModulePass) -> bool:
        """Returns whether a place runs in float32."""
        return self._places.get(candidate_of(place.path, self.candidates)) in self.wide

    def replaced(self, place: ModulePass, value: PlacedValue, array: Any) -> PlacedValue:
        return PlacedValue([array]) if self.is_wide(place) else value

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        arrays = [value.arrays[0] for value in values]
        if self.is_wide(self.place_of(equation)):
            return [
                PlacedValue([output]) for output in bound_wide(equation, list(map(widen, arrays)))
            ]
        operands = [
            narrowed(a, dtype_of(atom)) for a, atom in zip(arrays, equation.invars, strict=True)
        ]
        return [PlacedValue([output]) for output in bind(equation, operands)]

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        return [PlacedValue([None], dtype_of(variable)) for variable in equation.outvars]

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        return PlacedValue([narrowed(value.arrays[0], like.origin)])

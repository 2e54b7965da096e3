"""Values that pass from one module to another, as an interpreter of a program finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from policy.inspect.traced.authors import is_by_layers, layer_of, source_of
from policy.inspect.traced.matmul_operands import LIMITS_CODES
from policy.inspect.traced.placed import (
    NO_REFERENCE,
    ModulePass,
    PlacedInterpreter,
    PlacedValue,
    Reference,
)
from policy.programs.jaxprs import Equation
from policy.programs.marks import AUTOCAST, BOUNDARY
from policy.programs.paths import Path


@dataclasses.dataclass(eq=False)
class ValueOrigin:
    """The origin of a value, and its record once it was read in another module.

    `made` is the equation, its operands, and the index of the result, if an interpreter notes it.
    """

    place: ModulePass
    primitive: str = ""
    source: str = ""
    measurement: Any = None
    made: tuple[Any, list[PlacedValue], int] | None = None


class ModuleValueInterpreter(PlacedInterpreter):
    """An interpreter that finds the values that pass from one module to another.

    Attributes:
      origin_type: the class of the origins of its values.
    """

    origin_type: type[ValueOrigin] = ValueOrigin

    def __init__(self, reference: Reference = NO_REFERENCE):
        super().__init__(reference)
        self._line_around = ""  # the source line of the enclosing equation

    def inside(self, equation: Equation) -> Self:
        inner = super().inside(equation)
        inner._line_around = source_of(equation) or self._line_around
        return inner

    def made_by(
        self, equation: Equation, place: ModulePass, values: Sequence[PlacedValue]
    ) -> tuple[str, str]:
        """Returns the user's operation that made a result, and its source line.

        The result of a cast of this library was made by the operation before.
        """
        stack = str(equation.source_info.name_stack)
        origin = values[0].origin if len(values) == 1 else None
        is_cast = equation.primitive.name == "convert_element_type" and (
            BOUNDARY in stack or AUTOCAST in stack or is_by_layers(equation)
        )
        if is_cast and origin and origin.source:
            return origin.primitive, origin.source
        source = source_of(equation) or self._line_around
        return equation.primitive.name, source or layer_of(equation, place.path)

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        place = self.place_of(equation)
        made_by = self.made_by(equation, place, values)
        return [PlacedValue([None], self.origin_type(place, *made_by)) for _ in equation.outvars]


def passes(value: PlacedValue, reader: ModulePass) -> bool:
    """Returns whether a value is read in another module than the one that computed it.

    Values that are saved for the backward pass are read in their own module there.
    """
    origin = value.origin
    return (
        origin is not None
        and origin.place.path != reader.path
        and reader.direction == origin.place.direction
        and reader.direction != "again"
    )


def unlimited(value: PlacedValue) -> PlacedValue:
    """Returns what a value was before it was limited and rounded for a cast to 8 bits."""
    while value.origin is not None and value.origin.made is not None:
        equation, operands, _ = value.origin.made
        if equation.primitive.name not in LIMITS_CODES:
            return value
        shape = value.arrays[0].shape
        whole = [one for one in operands if one.origin and one.arrays[0].shape == shape]
        if len(whole) != 1:
            return value
        (value,) = whole
    return value


def places_around(place: ModulePass, other: Path) -> dict[ModulePass, None]:
    """Returns the places around one that are not around another path, outermost first."""
    paths = (place.path[:n] for n in range(1, len(place.path) + 1))
    return {place._replace(path=p): None for p in paths if p != other[: len(p)]}

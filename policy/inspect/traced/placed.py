"""An interpreter that knows the module path and the pass of each equation of a program."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, cast

import jax

from policy.inspect.traced.matmul_operands import EnclosingEquations
from policy.inspect.traced.module_paths import module_path
from policy.programs.jaxprs import Equation
from policy.programs.paths import Path, path_of
from policy.programs.rewriting.interpreter import Interpreter, manual_axes

_HOST = jax.memory.Space.Host


class ModulePass(NamedTuple):
    """A module path and a pass; "again" is the recomputation of a checkpoint."""

    path: Path = ()
    direction: Literal["forward", "backward", "again"] = "forward"


class PlacedValue:
    """A value of the traced program at run time.

    Attributes:
      arrays: one array for each lane that computes its own; a lane without one reads the first.
      origin: the place that computed it, in a type that each interpreter chooses.
    """

    __slots__ = ("arrays", "origin")

    def __init__(self, arrays: Sequence[Any], origin: Any = None):
        self.arrays, self.origin = tuple(arrays), origin


@dataclasses.dataclass(frozen=True)
class Reference:
    """Changes, beside those of dtypes, that make a program the function in float32.

    Attributes:
      constants: the float32 values of constants that the program holds in half precision, by the
        `id` of an equation and the place of an operand.
      exact: the `id`s of equations that round widened half precision to as many bits, which they
        should not do in float32.
      unpaired: the paths with constants whose float32 values are not known.
    """

    constants: Mapping[int, Mapping[int, Any]] = dataclasses.field(default_factory=dict)
    exact: frozenset[int] = frozenset()
    unpaired: tuple[Path, ...] = ()


NO_REFERENCE = Reference()


class PlacedInterpreter(Interpreter[PlacedValue]):
    """An interpreter of arrays that knows the place of each equation.

    Attributes:
      place: the place of the equation whose body is being run.
      bodies: the programs of the enclosing equations, outermost first.
      axes: the mesh axes of the enclosing `shard_map`s.
      chain: the enclosing equations.
      reference: the differences of the program from the function in float32.
    """

    def __init__(self, reference: Reference = NO_REFERENCE) -> None:
        super().__init__()
        self.reference = reference
        self.place = ModulePass()
        self.axes: tuple[str, ...] = ()
        self.bodies: tuple[object, ...] = ()
        self.chain: EnclosingEquations = ()

    # Values ---------------------------------------------------------------------------------------

    def constant(self, array: Any) -> PlacedValue:
        return PlacedValue([array])

    def arrays(self, value: PlacedValue) -> Sequence[Any]:
        return value.arrays

    def filled(self, value: PlacedValue, arrays: Sequence[Any]) -> PlacedValue:
        return PlacedValue(arrays, value.origin)

    # Programs inside equations --------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        return [PlacedValue([None]) for _ in equation.outvars]

    def entering(self, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        return [PlacedValue(value.arrays) for value in values]

    def place_of(self, equation: Equation) -> ModulePass:
        """Returns the position of an equation."""
        name_stack = str(equation.source_info.name_stack)
        is_again = "rematted_computation" in name_stack
        is_backward = "transpose(" in name_stack or self.place.direction == "backward"
        path = module_path(path_of(name_stack, self.place.path), is_backward)
        direction = "backward" if is_backward else self.place.direction
        return ModulePass(path, "again" if is_again else direction)

    def inside(self, equation: Equation) -> Self:
        inner = copy.copy(self)
        inner.place, inner.chain = self.place_of(equation), (*self.chain, id(equation))
        if equation.primitive.name == "shard_map":
            inner.axes = (*self.axes, *manual_axes(equation))
        return inner

    def tracing(self, program: Any) -> Self:
        inner = super().tracing(program)
        inner.bodies = (*self.bodies, program)
        return inner

    def standing_in(self, outer: PlacedInterpreter) -> Self:
        """Returns this interpreter, moved to the place of another."""
        self.place, self.axes, self.bodies = outer.place, outer.axes, outer.bodies
        self.chain, self.reference = outer.chain, outer.reference
        return self

    # The function in float32 ----------------------------------------------------------------------

    def step(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if id(equation) in self.reference.exact:
            return values
        found = self.reference.constants.get(id(equation))
        if found is not None:
            values = self.with_constants(equation, values, found)
        if _HOST in equation.params.get("devices", ()):  # measured on the device
            there, places = cast("Any", equation), (jax.memory.Space.Device,) * len(values)
            equation = there.replace(params=equation.params | {"devices": places})
        return self.equation(equation, values)

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        """Returns the operands of an equation with constants that were not rounded."""
        exact = {k: PlacedValue([array], values[k].origin) for k, array in found.items()}
        return [exact.get(k, value) for k, value in enumerate(values)]

"""The record of a run: what was measured, and where it was computed and read."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.typing import DTypeLike

from policy.programs.reading.matmul_operands import QuantisedOperand
from policy.programs.rewriting.placed_interpreter import ModulePass, PlacedValue


@dataclasses.dataclass(eq=False)
class Measurement:
    """A measured value.

    Attributes:
      key: the key of its numbers among the notes of a run; keys increase in program order.
      primitive, source: the operation that computed it, and its source line.
      dtype: its dtype in the program that is compared.
      made: the place that computed it.
      bodies: the enclosing programs, outermost first.
      left: the paths that it leaves: it was computed inside them and is read outside.
      entered: the paths that it enters: it was computed outside them and is read inside.
      output: its index among the outputs of the program, or None.
      returned: the paths that it leaves as an output.
    """

    key: int
    primitive: str
    source: str
    dtype: DTypeLike
    made: ModulePass
    bodies: tuple[Any, ...] = ()
    left: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    entered: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    output: int | None = None
    returned: dict[ModulePass, None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Origin:
    """The origin of a value, and its measurement once it was read in another module.

    `made` is the equation, its operands, and the index of the result, if it may be rematerialised.
    `coded` is the dtype of the first array, if that is encoded: see
    `policy.inspect.compare.stacked`. `is_inner` tells whether it is a code or a scale of a matmul
    in 8 bits, which is not measured.
    """

    place: ModulePass
    primitive: str = ""
    source: str = ""
    measurement: Measurement | None = None
    made: tuple[Any, list[PlacedValue], int] | None = None
    coded: Any = None
    is_inner: bool = False


@dataclasses.dataclass(frozen=True)
class MeasuredCodes:
    """Measured codes of an operand of matmuls in 8 bits.

    Attributes:
      key: the key of their numbers among the notes of a run.
      of: the operand.
      dtype: of the codes.
    """

    key: int
    of: QuantisedOperand
    dtype: DTypeLike


@dataclasses.dataclass
class Log:
    """A record of a run: its places in program order, the measured values, and the 8-bit codes."""

    places: dict[ModulePass, None] = dataclasses.field(default_factory=dict)
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    codes: list[MeasuredCodes] = dataclasses.field(default_factory=list)

"""How large a program is, and how straight the line is along which it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.table import Row
from policy.programs.jaxprs import equations_within


def equations(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those of programs inside of it included."""
    return sum(1 for _ in equations_within(jaxpr))


def growth(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """What one more costs at the far end and at the near end: over the last step, and over the
    steps to the third.

    Near the origin two steps are taken together: of seconds, there is little to measure.
    """
    near = min(2, len(xs) - 2)
    return (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), (ys[near] - ys[0]) / (xs[near] - xs[0])


def straight(
    quantity: str, name: str, xs: Sequence[float], ys: Sequence[float], bound: float | None
) -> Row:
    """The row of a line; its ratio is 1 where it is straight."""
    return Row(
        quantity,
        f"{name}, {xs[-2]:g}-{xs[-1]:g} / {xs[0]:g}-{xs[min(2, len(xs) - 2)]:g}",
        *growth(xs, ys),
        bound,
    )

"""Rows of compiled programs: ours beside a reference, of one target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from benchmarks.accel.program import Figures
from benchmarks.table import Row
from policy.inspect.estimate.targets import Target

Bounds = Mapping[str, float | None]


def rows_of(
    name: str,
    target: Target,
    ours: Figures,
    reference: Figures,
    bounds: Bounds | None = None,
    note: str = "",
) -> Iterator[Row]:
    """Yields a row of each quantity that the target's compiler gives.

    Args:
      bounds: the largest ratios, by quantity: "cycles", "bytes", "temporary", "kernels",
        "exchange", "seconds".
    """
    bounds = bounds or {}
    ours, reference = alike(ours, reference)
    for quantity in quantities(target, ours, reference):
        yield Row(
            quantity,
            name,
            amount(target, ours, quantity),
            amount(target, reference, quantity),
            bounds.get(quantity),
            note=_note(quantity, ours, note),
            target=target.name,
            unknown=unknown(quantity, ours, reference),
        )


def alike(*figures: Figures) -> tuple[Figures, ...]:
    """Makes the bytes of several programs comparable: counted by shapes in all if a loop runs in
    any.
    """
    if any(figure.has_loops for figure in figures):
        return tuple(dataclasses.replace(figure, bytes=figure.moved) for figure in figures)
    return figures


def quantities(target: Target, *figures: Figures) -> tuple[str, ...]:
    """Returns the quantities of a target: no cycles on a GPU, no exchange on one device."""
    exchanges = any(figure.exchange for figure in figures)
    cycles = ("cycles", *(("seconds",) if exchanges else ())) if target.chip.clock else ()
    return (*cycles, "bytes", "temporary", "kernels", *(("exchange",) if exchanges else ()))


def amount(target: Target, figures: Figures, quantity: str) -> float:
    """Returns the figure of a quantity: seconds are those of cycles and exchange together, exchange
    is bytes.
    """
    if quantity == "seconds":
        return figures.cycles / target.chip.clock + figures.exchange
    if quantity == "exchange":
        return sum(figures.collectives.values())
    return float(getattr(figures, quantity))


def unknown(quantity: str, *figures: Figures) -> str:
    """Names the costs that a quantity's figures leave out; "" where there are none."""
    if quantity == "temporary":
        return ""
    return "; ".join(dict.fromkeys(what for figure in figures for what in figure.uncounted))


def _note(quantity: str, ours: Figures, note: str) -> str:
    if quantity == "exchange":
        return ", ".join(f"{operation} of {dtype}" for operation, dtype in sorted(ours.collectives))
    if quantity == "seconds":
        return f"{ours.exchange * 1e6:.0f} us of them exchange" if ours.exchange else ""
    if quantity == "cycles" and ours.rooflines:
        return "; ".join(
            [*([note] if note else []), f"at the roofline: {', '.join(ours.rooflines)}"]
        )
    return note if quantity == "cycles" else ""

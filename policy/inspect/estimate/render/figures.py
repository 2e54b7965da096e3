"""The figures of an estimate as words, for all of its forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from policy.inspect.estimate.rows import Buffer, EstimateRows, PolicyCost
from policy.inspect.render.parts import MEMORY
from policy.inspect.render.terminal import short
from policy.inspect.render.units import amount, bytes_text, duration

UNKNOWN = "—"


@dataclasses.dataclass(frozen=True)
class Figures:
    """A column of figures.

    Attributes:
      head: its heading.
      value: the figure of a row; None if it is unknown.
      form: writes a figure.
      is_compared: whether rows beside the first have ratios too.
      is_bound: whether figures may be lower bounds, as seconds.
    """

    head: str
    value: Callable[[PolicyCost], float | None]
    form: Callable[[float], str]
    is_compared: bool = True
    is_bound: bool = False

    def text(self, row: PolicyCost) -> str:
        """Returns the figure of a row: "≥ 1.2 ms" where it is a lower bound."""
        value = self.value(row)
        if value is None:
            return UNKNOWN
        return f"{'≥ ' if self.is_bound and row.is_lower_bound else ''}{self.form(value)}"


def columns_of(estimate: EstimateRows) -> list[Figures]:
    """Returns the columns of figures that any row has."""
    memory = [
        Figures(part, functools.partial(memory_parts, part=part), bytes_text, False)
        for part in MEMORY
    ]
    flops = Figures("matmul FLOPs", lambda row: sum(row.matmul_flops.values()), amount, False)
    measured = [
        Figures("bytes", lambda row: row.bytes, bytes_text),
        Figures("cycles", lambda row: row.cycles, amount),
        Figures("seconds", lambda row: row.seconds, duration, is_bound=True),
        Figures("exchanges", exchanged_bytes, bytes_text),
        Figures("kernels", lambda row: row.kernels, lambda count: f"{count:,.0f}", False),
        Figures("compiled in", lambda row: row.compile_seconds, duration, False),
    ]
    absent = () if has_exchanges(estimate) else ("exchanges",)
    known = [
        column
        for column in measured
        if column.head not in absent and any(column.value(row) is not None for row in estimate.rows)
    ]
    return [Figures("memory", memory_parts, bytes_text), *memory, flops, *known]


def facts_of(estimate: EstimateRows) -> Iterator[tuple[str, str]]:
    """Yields the facts that hold for all rows: a word, and what there is to say of it."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in estimate.mesh.items())
    devices = f"{estimate.devices} device{'' if estimate.devices == 1 else 's'}"
    memory = bytes_text(estimate.capacity) if estimate.capacity else "an unknown amount"
    each = "" if estimate.devices == 1 else " each"
    yield (
        "target",
        f"{estimate.target}: {devices} of {memory} of memory{each}"
        + (f"; mesh {mesh}" if mesh else ""),
    )
    yield "seconds", _seconds_from(estimate)
    if estimate.source:
        yield "figures", estimate.source
    if estimate.compiler:
        yield "compiler", estimate.compiler
    if estimate.devices > 1:
        yield "counts", "FLOPs are of all devices together, all other figures per device"


def _seconds_from(estimate: EstimateRows) -> str:
    if not estimate.timing:
        return "unknown: this device has neither cycles nor published peaks"
    clock = f" at an assumed clock of {amount(estimate.clock, 'Hz')}" if estimate.clock else ""
    bound = any(row.is_lower_bound and row.seconds is not None for row in estimate.rows)
    return f"{estimate.timing}{clock}" + ("; ≥ where some costs are not counted" if bound else "")


def verdict(row: PolicyCost) -> str:
    """Returns whether a row fits, and by how much: "fits, 3.1 GiB spare" or "lacks 4.2 GiB"."""
    if row.fits is None:
        return UNKNOWN
    spare = row.spare or 0
    if row.fits:
        return f"fits, {bytes_text(spare)} spare"
    return f"lacks {bytes_text(-spare)}" if spare < 0 else "does not fit"


def count_that_fit(estimate: EstimateRows) -> str:
    """Returns a sentence's part on how many rows fit; "" if that is unknown."""
    known = [row.fits for row in estimate.rows if row.fits is not None]
    if not known:
        return ""
    if all(known):
        return "it fits" if len(known) == 1 else f"all {len(known)} policies fit"
    return "it does not fit" if len(known) == 1 else f"{sum(known)} of {len(known)} policies fit"


def shares_text(flops: Mapping[str, float]) -> str:
    """Returns the shares of FLOPs by dtype: "bf16 98.2%, f32 1.8%"."""
    total = sum(flops.values())
    parts = {dtype: part / total for dtype, part in flops.items() if part}
    if len(parts) == 1:
        return short(*parts)
    return ", ".join(f"{short(dtype)} {part:.1%}" for dtype, part in parts.items())


def exchanged_bytes(row: PolicyCost) -> float | None:
    """Returns the bytes of all exchanges of a row; None if its program didn't compile."""
    if row.kernels is None and not row.collectives:
        return None
    return float(sum(one.bytes for one in row.collectives))


def memory_parts(row: PolicyCost, part: str = "memory") -> int | None:
    """Returns the bytes of a part of a row's memory; None if the compiler gave up without any."""
    return None if row.is_exhausted and not row.memory else getattr(row, part)


def has_exchanges(estimate: EstimateRows) -> bool:
    """Returns whether any row exchanges anything."""
    return any(row.collectives for row in estimate.rows)


def ratio(value: float | None, first: float | None) -> str:
    """Returns a figure as a ratio of the first row's: "x0.64"; "" where there is none."""
    if value is None or not first:
        return ""
    found = value / first
    return f"x{found:.2f}" if found < 100 else f"x{found:.0f}"


def array_text(buffer: Buffer) -> str:
    """Returns the dtype and shape of an array: "bf16[8,128]"."""
    return f"{short(buffer.dtype)}[{','.join(map(str, buffer.shape))}]"


def uncounted_in(estimate: EstimateRows) -> list[tuple[str, str]]:
    """Returns each cost that is left out, with the names of its rows; "" stands for all rows."""
    found: dict[str, list[str]] = {}
    for row in estimate.rows:
        for what in dict.fromkeys(row.uncounted):
            found.setdefault(what, []).append(row.name)
    everywhere = len(estimate.rows)
    return [
        (what, "" if len(names) == everywhere else ", ".join(names))
        for what, names in found.items()
    ]

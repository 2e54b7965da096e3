"""Rows of ratios and their bounds: printing, checking and writing them."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: the same quantity of ours and of its reference, measured in one run.

    Attributes:
      quantity: what is counted: "flops", "bytes", "saved", ...
      name: of what: a model, a layer.
      ours, reference: the two figures.
      bound: the largest ratio ours / reference that is allowed; None where the row only reports.
      at_least: the smallest.
      note: why it has another bound than its neighbors, or none.
      target: the chip or topology that the figures are of; "" is the machine that measured them.
      unknown: what the figures leave out. Such a row is missed.
    """

    quantity: str
    name: str
    ours: float
    reference: float
    bound: float | None = None
    at_least: float = 0.0
    note: str = ""
    target: str = ""
    unknown: str = ""

    @property
    def ratio(self) -> float:
        if self.reference:
            return self.ours / self.reference
        return 1.0 if self.ours == 0 else float("inf")

    @property
    def is_missed(self) -> bool:
        """True where the ratio, at the four digits that are printed, is out of its bounds.

        A row with `unknown` costs is missed, and so is one with `at_least` whose reference is 0.
        """
        if self.unknown or (self.at_least and not self.reference):
            return True
        return self.bound is not None and not self.at_least <= round(self.ratio, 4) <= self.bound

    def as_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "ratio": self.ratio, "missed": self.is_missed}


def header(reference: str = "reference") -> str:
    return f"{'':10}{'':48}{'ours':>11}{reference:>11}{'ratio':>8}{'bound':>7}"


def line(row: Row) -> str:
    bound = "" if row.bound is None else f"{row.bound:g}"
    numbers = f"{row.ours:11.4g}{row.reference:11.4g}{row.ratio:8.4f}{bound:>7}"
    name = f"{row.name}, {row.target}" if row.target else row.name
    remarks = (f"not counted: {row.unknown}" if row.unknown else "", row.note)
    return f"{row.quantity:10}{name:48}{numbers}{'  missed' if row.is_missed else ''}" + "".join(
        f"  ({remark})" for remark in remarks if remark
    )


def shown(rows: Iterable[Row], reference: str) -> list[Row]:
    """Prints rows as they are measured, and returns them."""
    measured = []
    for row in rows:
        if not measured:
            print(header(reference))
        measured.append(row)
        print(line(row), flush=True)
    return measured


def run(
    description: str | None,
    rows: Callable[..., Iterable[Row]],
    reference: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """The command line of a table: ``--check``, ``--small``, ``--json FILE``. Returns the exit
    status.

    Args:
      description: the module's docstring.
      rows: measures the rows: called with True for the small ones, False for all. Where it takes
        ``on`` or ``only``, the command has ``--on TARGET ...`` and ``--only NAME ...``.
      reference: what the ratios are taken against, in a word.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a ratio misses its bound"
    )
    parser.add_argument("--small", action="store_true", help="smaller models")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    selections = {"on": "chips or targets", "only": "parts of names"}
    taken = [name for name in selections if name in inspect.signature(rows).parameters]
    for name in taken:
        parser.add_argument(
            f"--{name}", nargs="+", default=[], metavar="NAME", help=selections[name]
        )
    options = parser.parse_args(arguments)
    measured = shown(
        rows(options.small, **{name: getattr(options, name) for name in taken}), reference
    )
    if options.json:
        Path(options.json).write_text(json.dumps([row.as_json() for row in measured], indent=1))
    missed = [row for row in measured if row.is_missed]
    for row in missed if options.check else ():
        print(f"missed: {missed_line(row)}", file=sys.stderr)
    return int(options.check and bool(missed))


def missed_line(row: Row) -> str:
    """Describes in a line the bound that a row misses."""
    what = f"{row.quantity} of {row.name}" + (f" on {row.target}" if row.target else "")
    if row.unknown:
        return f"{what}: not counted is {row.unknown}"
    return f"{what}: {row.ratio:.4f}, bound {row.bound:g}"

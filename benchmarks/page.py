"""docs/benchmarks.md, made from the rows of runs: each table with ratios by name and quantity, and
what it says.

python -m benchmarks accel --json accel.json                    # what TPUs and GPUs get
python -m benchmarks --json cpu.json                            # and XLA's programs for CPUs
python -m benchmarks.page accel.json cpu.json > docs/benchmarks.md
python -m benchmarks.page accel.json --into docs/benchmarks.md  # the accelerators' part alone
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTES = Path(__file__).parent / "notes"
OPENING, CLOSING = "<!-- accelerators -->", "<!-- end of accelerators -->"


def markdown(environment: Mapping[str, str], tables: Mapping[str, Any]) -> str:
    """The page. Tables of rows of ratios are shown, the accelerators' first; others are named with
    their own pages.
    """
    parts = [
        "# Benchmarks",
        "The tables of `python -m benchmarks --markdown FILE`, of which `--only NAME` makes one; "
        "with `--check` it fails where a bound is missed, and names the row.",
        "No GPU was at hand: `python -m benchmarks gpu` is what to run on one, in 8 minutes at "
        "most."
        if "gpu" not in tables
        else "",
        accelerators(environment, tables["accel"]) if tables.get("accel") else "",
        f"# XLA for CPUs\n\n{_where(environment)}" if set(tables) - {"accel"} else "",
        "What XLA counts is the same on every run; CPU seconds are not. Numerics have pages of "
        "their own: [accuracy.md](accuracy.md) and [convergence.md](convergence.md); so has "
        "[the exchange between devices](bf16_all_reduce.md).",
    ]
    for name, rows in tables.items():
        if (
            name != "accel"
            and isinstance(rows, list)
            and rows
            and all("ratio" in row for row in rows)
        ):
            parts += [f"## {name}", _note(name), _table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def accelerators(environment: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The part of the page on TPUs and GPUs: a table for each chip and each of the command's
    tables.
    """
    versions = {
        name: version for name, version in environment.items() if version != "not installed"
    }
    parts = [OPENING, "# TPUs and GPUs", _where(versions), _note("accelerators")]
    tables = dict.fromkeys(row["table"] for row in rows if row["table"] != "baseline")
    for name in tables:
        of_table = [row for row in rows if row["table"] == name]
        parts += [f"## {name} on accelerators", _note(f"{name}_on_accelerators")]
        for target in dict.fromkeys(row["target"] for row in of_table):
            of_target = [row for row in of_table if row["target"] == target]
            parts += [
                f"### {target}" if target else "",
                _table(of_target, "ours / by hand", _with_figures),
            ]
    return "\n\n".join(part for part in [*parts, CLOSING] if part)


def into(page: str, part: str) -> str:
    """A page with its part on accelerators replaced; one that has none gets it after its first
    paragraph.

    Raises:
      ValueError: the page's part has no end.
    """
    if OPENING in page:
        before, _, rest = page.partition(OPENING)
        if CLOSING not in rest:
            raise ValueError(f"The page has {OPENING}, and no {CLOSING} after it.")
        return before + part + rest.partition(CLOSING)[2]
    title, first, rest = page.split("\n\n", 2)
    return "\n\n".join((title, first, part, rest))


def _note(name: str) -> str:
    """The text that stands before a table; empty where the table has none."""
    note = NOTES / f"{name}.md"
    return note.read_text(encoding="utf-8").strip() if note.exists() else ""


def _where(environment: Mapping[str, str]) -> str:
    where = ", ".join(
        f"{name} {value}" for name, value in environment.items() if name not in ("date", "device")
    )
    return f"{environment['date']}, on {environment['device']}, {where}."


def _table(
    rows: Sequence[Mapping[str, Any]],
    corner: str = "ours / reference",
    cell: Callable[[Mapping[str, Any]], str] | None = None,
) -> str:
    """A line for each name, a column for each quantity; a missed bound in bold, with the bound."""
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    names: dict[str, dict[str, str]] = {}
    for row in rows:
        names.setdefault(row["name"], {})[row["quantity"]] = (cell or _cell)(row)
    lines = [[corner, *quantities], ["---", *["---:"] * len(quantities)]]
    lines += [
        [name, *(cells.get(quantity, "") for quantity in quantities)]
        for name, cells in names.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Mapping[str, Any]) -> str:
    ratio = f"{row['ratio']:.3f}"
    bound = "" if row["bound"] is None else f" (bound {row['bound']:g})"
    return f"**{ratio}**{bound}" if row["missed"] else ratio


def _with_figures(row: Mapping[str, Any]) -> str:
    """The ratio, and the figures that it is of."""
    unknown = f", not counted: {row['unknown']}" if row["unknown"] else ""
    return f"{_cell(row)} ({_short(row['ours'])} / {_short(row['reference'])}{unknown})"


def _short(number: float) -> str:
    """Three digits and a unit: 12.3M."""
    for unit, size in (
        ("T", 1e12),
        ("G", 1e9),
        ("M", 1e6),
        ("k", 1e3),
        ("", 1.0),
        ("m", 1e-3),
        ("u", 1e-6),
    ):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page of what runs wrote with ``--json``, or replaces the accelerators' part of a
    page.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="written by python -m benchmarks --json"
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="replace the accelerators' part of this page"
    )
    options = parser.parse_args(arguments)
    runs = [json.loads(file.read_text()) for file in options.files]
    of_accel = [run for run in runs if run["tables"].get("accel")]
    if options.into and not of_accel:
        print(
            "There are no accelerators' rows: python -m benchmarks accel --json FILE writes them.",
            file=sys.stderr,
        )
        return 2
    if options.into:
        part = accelerators(of_accel[-1]["environment"], of_accel[-1]["tables"]["accel"])
        options.into.write_text(into(options.into.read_text(), part))
        return 0
    tables = {name: rows for run in runs for name, rows in run["tables"].items()}
    print(markdown(runs[-1]["environment"], tables), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What four train steps cost under policies on one v5e chip, 256 of them and 8 H100s, compiled from
shapes alone.

    python -m benchmarks estimates          # every table: three quarters of an hour on 2 idle cores
    python -m benchmarks estimates --write  # and stores them, and writes docs/estimates.md
    python -m benchmarks estimates --only resnet smollm2 --on h100:8  # some models, on some devices
    python -m benchmarks estimates --quick  # small models on a v5e chip and 8 H100s: two minutes
    python -m benchmarks.estimates --only smollm2 --policies float32 --write  # a row of each table
    python -m benchmarks.estimates --missing --write  # only rows that are not stored
    python -m benchmarks.estimates --stored --write   # compiles nothing: the page of stored rows

Each table is that of a `python -m policy estimate` command, which stands above it. Results are
stored as JSON in benchmarks/estimates/results/, of which docs/estimates.md is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimates import page
from benchmarks.estimates.tables import Choice, Table, measured, record, store, stored, tables
from benchmarks.estimates.training import counts_of

QUICK_TARGETS = ("v5e:1x1", "h100:8")


def chosen_rows(table: Table, policies: Sequence[str], missing: bool) -> list[Choice]:
    """Returns the rows of a table that are to be compiled."""
    before = stored(table) if missing else None
    known = () if before is None else [row["name"] for row in before["rows"]]
    return [
        choice
        for choice in table.model.choices
        if choice.name not in known and (not policies or choice.name in policies)
    ]


def run(table: Table, choices: Sequence[Choice], quick: bool, write: bool) -> dict[str, Any] | None:
    """Compiles rows of a table, stores each where `write` is set, and returns the record."""
    found = stored(table) if write else None
    module = table.model.loaded()
    _, args = module.example(**(module.QUICK if quick else {}))
    counts = counts_of(args) | {"flops": module.flops_by_hand()}
    for estimate in measured(table, choices, quick):
        print(f"{table.model.module}, {table.target}: {estimate.rows[0].name}", flush=True)
        found = record(estimate, counts, found)
        if write:
            store(table, found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 2 for unknown names, or where a compiler is not
    installed; else 0.
    """
    options = _parser().parse_args(arguments)
    if options.quick and options.write:
        print("--quick compiles small models, which no page is made of.", file=sys.stderr)
        return 2
    on = options.on or (QUICK_TARGETS if options.quick else ())
    try:
        asked = tables(options.only, on)
        found = [] if options.stored else [_of(table, options) for table in asked]
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.stored:
        found = [(table, one) for table in asked if (one := stored(table)) is not None]
    for table, one in found:
        if one is not None:
            print(f"\n{page.section(table, one)}")
    if options.write:
        page.PAGE.write_text(page.page())
    if options.json:
        options.json.write_text(
            json.dumps([one for _, one in found if one is not None], indent=1) + "\n"
        )
    return 0


def _of(table: Table, options: argparse.Namespace) -> tuple[Table, dict[str, Any] | None]:
    choices = chosen_rows(table, options.policies, options.missing)
    return table, run(
        table, choices[:1] if options.quick else choices, options.quick, options.write
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="MODEL", help="models, by their modules' names")
    add("--on", nargs="+", default=[], metavar="TARGET", help="targets, as in v5e:16x16")
    add("--policies", nargs="+", default=[], metavar="ROW", help="rows, by their names")
    add("--missing", action="store_true", help="only rows that are not stored")
    add("--stored", action="store_true", help="the stored rows; nothing is compiled")
    add("--quick", action="store_true", help="a row each of small models")
    add("--write", action="store_true", help="store the rows and write docs/estimates.md")
    add("--json", type=Path, metavar="FILE", help="a file to write the tables to")
    return parser


if __name__ == "__main__":
    sys.exit(main())

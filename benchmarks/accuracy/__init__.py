"""The accuracy table: each layer and function in bfloat16 and float16, in ulps of its output,
beside Flax, JAX, Optax and torch.

    python -m benchmarks.accuracy            # prints the table; 1 where a bound is missed
    python -m benchmarks.accuracy --write    # stores the figures too, and writes docs/accuracy.md
    python -m benchmarks.accuracy --stored --write  # measures nothing: the page of stored figures
    python -m benchmarks.accuracy --only REGEX --small --json FILE --markdown FILE

`notes.md` beside this file explains the figures and the bounds; it is the first part of the page.
The page shows the largest errors, and the cases where others are off by more. `results.json` has
every row.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.accuracy import report
from benchmarks.accuracy.cases import PRECISIONS, Case, Precision, Row, measure
from benchmarks.accuracy.function_cases import function_cases
from benchmarks.accuracy.layer_cases import layer_cases
from benchmarks.command import page_parser

HERE = pathlib.Path(__file__).parent
NOTES, RESULTS = HERE / "notes.md", HERE / "results.json"
PAGE = HERE.parents[1] / "docs" / "accuracy.md"


def selected(small: bool = False, only: str = "") -> Iterator[tuple[Case, Precision]]:
    """Each case with each precision that it is measured in; `only` is a regex searched for in its
    name.
    """
    for case in (*layer_cases(small), *function_cases(small)):
        for precision in PRECISIONS:
            if (case.wide or not precision.wide) and re.search(only, f"{case}, {precision}"):
                yield case, precision


def stored() -> dict[str, Any]:
    """Returns the stored figures, as `report.as_json` made them."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def page(record: report.Record) -> str:
    """Returns docs/accuracy.md for these figures."""
    return report.markdown(record, NOTES.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 1 where a row misses a bound, 2 where `--only` matches nothing, or where
    `--write` is given for a part of the rows.
    """
    options = _parser().parse_args(arguments)
    if options.write and (options.only or options.small):
        print("--write stores the whole table: leave --only and --small out.")
        return 2
    record = stored() if options.stored else _measured(options.small, options.only)
    if not record["rows"]:
        print(f"No row matches --only {options.only!r}.")
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.write and not options.stored:
        if record["environment"]["torch"] == "not installed":
            record = report.with_stored_torch(record, stored())
        RESULTS.write_text(report.dumped(record), encoding="utf-8")
    for file in (options.markdown, PAGE if options.write else None):
        if file is not None:
            file.write_text(page(record), encoding="utf-8")
    return int(any(row["complaints"] for row in record["rows"]))


def _measured(small: bool, only: str) -> dict[str, Any]:
    """Measures rows, prints them and returns their record."""
    rows: list[Row] = [measure(case, precision) for case, precision in selected(small, only)]
    if rows:
        print(report.text(rows), report.about_torch(), report.summary(rows), sep="\n\n")
    return report.as_json(rows)


def _parser() -> argparse.ArgumentParser:
    made = page_parser("benchmarks.accuracy", __doc__, "accuracy.md")
    made.add_argument("--only", default="", help="a regex: the rows to measure")
    made.add_argument("--small", action="store_true", help="the shapes of the test")
    return made

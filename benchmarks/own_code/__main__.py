"""Models with code of their own, as people write it for float32, under a policy.

python -m benchmarks.own_code           # prints the table: 2 minutes on two cores
python -m benchmarks.own_code --only scan rotary  # some snippets, by parts of their names
python -m benchmarks.own_code --counts  # counts alone, without compiling: 20 seconds
python -m benchmarks.own_code --write   # puts the table into docs/own_layers.md
python -m benchmarks.own_code --check   # exits with 1 where a bound is missed, and names the rows

Each snippet stands between a provided LayerNorm and a provided Dense, a loss after both: in classes
of `mpmodules.linen` and `mpmodules.nnx`, and in Flax's own, ported by `apply_policy`. Of the
program of a loss and its gradients:

float32 matmuls  matmuls and convolutions with a float32 operand. Bound: 0.
half sums        sums of several terms in half precision. Bound: 0.
errors           of the gradients of all parameters, beside the same maths in float64; divided by
                 that of the same maths under `policy.autocast`. Bound: 1.25.

A model that fails is a row with the first line of its error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import marked_parser, shown_table
from benchmarks.eight_bits.report import environment
from benchmarks.own_code import measure
from benchmarks.own_code.models import WAYS
from benchmarks.own_code.more_snippets import MORE
from benchmarks.own_code.rows import Row, table
from benchmarks.own_code.snippet import Snippet
from benchmarks.own_code.snippets import FIRST
from benchmarks.packages.measure import told

PAGE = Path(__file__).parents[2] / "docs" / "own_layers.md"
SNIPPETS = (*FIRST, *MORE)


def row_of(snippet: Snippet, counts_only: bool = False) -> Row:
    """Measures a snippet in all ways and policies."""
    found: dict[tuple[str, str], Any] = {}
    truths = None if counts_only else measure.Truths.of(snippet)
    for policy in measure.POLICIES:
        for way in WAYS:
            try:
                found[policy, way] = (
                    measure.counts(snippet, way, policy)
                    if truths is None
                    else measure.measured(snippet, way, policy, truths)
                )
            except Exception as error:
                found[policy, way] = told(error)
    return Row(snippet.name, found)


def rows(only: Sequence[str], counts_only: bool) -> Iterator[Row]:
    """Measures the snippets whose names have a part of `only`, or all."""
    for snippet in SNIPPETS:
        if not only or any(part.lower() in snippet.name.lower() for part in only):
            yield row_of(snippet, counts_only)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 where a bound is missed under ``--check``, else 0."""
    parser = marked_parser(__doc__, PAGE)
    add = parser.add_argument
    add("--counts", action="store_true", help="counts alone, without errors")
    add("--json", type=Path, metavar="FILE", help="a file to write every row to")
    options = parser.parse_args(arguments)
    if options.write and (options.only or options.counts):
        parser.error("--write replaces the whole table: leave out --only and --counts")
    found = list(rows(options.only, options.counts))
    if options.json:
        options.json.write_text(json.dumps([_as_json(row) for row in found], indent=1) + "\n")
    how = f"Medians of {len(measure.SEEDS)} draws, {environment()}:"
    missed = [line for row in found for line in row.missed()]
    return shown_table(options, PAGE, "own code", how, table(found), missed)


def _as_json(row: Row) -> dict[str, Any]:
    return {"name": row.name} | {
        f"{policy}, {way}": each if isinstance(each, str) else dataclasses.asdict(each)
        for (policy, way), each in row.found.items()
    }


if __name__ == "__main__":
    sys.exit(main())

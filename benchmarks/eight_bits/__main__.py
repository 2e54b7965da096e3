"""Matmuls in 8 bits beside bfloat16: their errors, where training ends, a published model.

python -m benchmarks.eight_bits                  # all tables: 40 minutes on two idle cores
python -m benchmarks.eight_bits --only errors    # one, or several
python -m benchmarks.eight_bits --check          # exits with 1 where a bound is missed
python -m benchmarks.eight_bits --quick --check  # errors, and a small language model: seconds
python -m benchmarks.eight_bits --only language_model --full  # all tokens of the example
python -m benchmarks.eight_bits --only smollm2 --write  # puts the table into docs/eight_bits.md
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.eight_bits import characters, errors, published, stored
from benchmarks.eight_bits.report import Table, environment, into
from policy import DtypePolicyWarning

PAGE = Path(__file__).parents[2] / "docs" / "eight_bits.md"
TABLES: dict[str, Callable[[], Table]] = {
    "errors": errors.table,
    "language_model": characters.table,
    "smollm2": published.smollm2,
    "smollm2_cache": published.smollm2_cache,
    "smollm2_params": stored.smollm2,
}
QUICK: dict[str, Callable[[], Table]] = {
    "errors": errors.table,
    "language_model": functools.partial(characters.table, quick=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a bound is missed under ``--check``, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(TABLES), metavar="NAME", help=", ".join(TABLES))
    add("--quick", action="store_true", help=f"small runs of {' and '.join(QUICK)}")
    add("--full", action="store_true", help="language_model with all tokens of the example")
    add("--check", action="store_true", help="exit with 1 where a bound is missed")
    add("--json", type=Path, metavar="FILE", help="a file to write the tables to")
    add("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    options = parser.parse_args(arguments)
    if options.write and (options.quick or options.full):
        parser.error("--write is for the figures of the whole run: leave out --quick and --full.")
    if options.quick and options.full:
        parser.error("--quick and --full are two sizes: give one.")
    warnings.simplefilter("ignore", DtypePolicyWarning)  # a CPU emulates 8 bits: see the page
    known = QUICK if options.quick else dict(TABLES)
    if options.full:
        known["language_model"] = functools.partial(characters.table, sizes={})
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"{', '.join(unknown)}: the quick run has {' and '.join(QUICK)} alone.")
    print(environment())
    tables = {}
    for name in options.only or known:
        tables[name] = known[name]()
        print(f"\n{name}\n\n{tables[name].markdown}", flush=True)
        if options.write:
            PAGE.write_text(into(PAGE.read_text(), name, tables[name]))
    if options.json:
        found = {name: dataclasses.asdict(table) for name, table in tables.items()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [line for table in tables.values() for line in table.missed]
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""Step times that others published, beside `policy.estimate`.

    python -m benchmarks.estimates.published --write                 # every row, two at a time
    python -m benchmarks.estimates.published --only vit-b16-h100-8   # some rows
    python -m benchmarks.estimates.published --missing --write       # rows that are not stored
    python -m benchmarks.estimates.published --stored --write        # compiles nothing

Each row is compiled in a process of its own and stored as JSON in
benchmarks/estimates/results/published/ when it is done. ``--write`` then writes docs/estimates.md,
whose last section is the table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.estimates import page
from benchmarks.estimates.published import results, table
from benchmarks.estimates.published.runs import RUNS, run_of

ROOT = Path(__file__).parents[3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 2 for an unknown row, 1 where one failed."""
    options = _parser().parse_args(arguments)
    try:
        runs = [run_of(name) for name in options.only] or list(RUNS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.missing:
        runs = [run for run in runs if results.stored(run) is None]
    if options.here:
        results.store(runs[0], results.measured(runs[0]))
        return 0
    with ThreadPoolExecutor(options.jobs) as pool:
        names = [] if options.stored else [run.name for run in runs]
        statuses = list(pool.map(_in_a_process, names))
    failed = [name for name, status in zip(names, statuses, strict=True) if status]
    print(table.figures([run for run in runs if results.stored(run) is not None]))
    if options.write:
        page.PAGE.write_text(page.page(), encoding="utf-8")
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _in_a_process(name: str) -> int:
    command = ["-m", "benchmarks.estimates.published", "--here", "--only", name]
    status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    print(f"{name}: {'failed' if status else 'done'}", flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimates.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="ROW", help="rows, by their names")
    add("--missing", action="store_true", help="only rows that are not stored")
    add("--stored", action="store_true", help="the stored rows; nothing is compiled")
    add("--jobs", type=int, default=2, metavar="N", help="rows that are compiled together")
    add("--write", action="store_true", help="write docs/estimates.md")
    add("--here", action="store_true", help="compile and store the first row in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())

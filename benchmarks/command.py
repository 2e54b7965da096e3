"""Shared by the commands of the benchmarks: arguments, runs of tables, the exit status."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import into


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of ``python -m name``, with the arguments that both commands take."""
    made = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="tables; accel's after it",
    )
    made.add_argument(
        "--on",
        nargs="+",
        default=[],
        metavar="CHIP",
        help="chips of accel's tables, as in v5e h100; targets of estimates",
    )
    made.add_argument(
        "--record", action="store_true", help="record the figures of accel's baselines"
    )
    made.add_argument("--quick", action="store_true", help="counts of small models")
    made.add_argument("--check", action="store_true", help="exit with 1 where a bound is missed")
    made.add_argument("--json", type=Path, metavar="FILE", help="a file to write every row to")
    return made


def page_parser(name: str, description: str | None, page: str) -> argparse.ArgumentParser:
    """Makes the parser of ``python -m name``, which stores figures and writes a page of docs/."""
    made = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--stored", action="store_true", help="measure nothing: take the stored figures")
    add("--write", action="store_true", help=f"store the figures and write docs/{page}")
    add("--json", type=Path, metavar="FILE", help="a file to write the figures to")
    add("--markdown", type=Path, metavar="FILE", help="a file to write the page to")
    return made


def marked_parser(description: str | None, page: Path) -> argparse.ArgumentParser:
    """Makes the parser of a command that puts a table between the marks of a page."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="rows, by parts of their names")
    add("--write", action="store_true", help=f"put the table into {page.name}")
    add("--check", action="store_true", help="exit with 1 where a bound is missed")
    return made


def shown_table(
    options: argparse.Namespace, page: Path, name: str, how: str, table: str, missed: Sequence[str]
) -> int:
    """Prints a table, puts it into a page under ``--write``, and names the missed bounds under
    ``--check``.

    Args:
      options: those of `marked_parser`.
      page: the file.
      name: of the page's marks.
      how: a sentence above the table.
      table: in Markdown.
      missed: the bounds that are missed, a line each.

    Returns:
      1 where a bound is missed under ``--check``, else 0.
    """
    print(table)
    if options.write:
        page.write_text(into(page.read_text(), f"{how}\n\n{table}", name))
    for line in missed if options.check else ():
        print(f"missed: {line}", file=sys.stderr)
    return int(options.check and bool(missed))


def run_table(
    name: str,
    title: str,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """Runs ``python -m module`` in a process of its own, and prints how long it took.

    Args:
      name: of the table.
      title: printed before it runs.
      module: takes ``--json FILE`` after `arguments`.
      environment: of the process; None is this one's.

    Returns:
      The exit status, and the rows; None where it wrote none.
    """
    print(f"\n== {title}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        called = [sys.executable, "-m", module, *arguments, "--json", str(file)]
        status = subprocess.run(called, check=False, env=environment).returncode
        rows = json.loads(file.read_text()) if file.exists() else None
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return status, rows


def exit_status(failed: Sequence[str]) -> int:
    """Names the tables that failed or missed a bound, and returns 1 if there are any, else 0."""
    if failed:
        print(f"\nfailed or missed a bound: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))

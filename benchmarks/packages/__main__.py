"""Models of published packages and trainers in bfloat16: ported by `apply_policy`, under
`autocast`, and by their own dtype option.

python -m benchmarks.packages          # makes an environment, and prints the table: 20 minutes
python -m benchmarks.packages --only griffin e3x  # some models, by parts of their names
python -m benchmarks.packages --environment FOLDER  # keeps the environment there, for the next time
python -m benchmarks.packages --clones FOLDER  # clones no repository: takes those in the folder
python -m benchmarks.packages --write  # puts the table into docs/ports.md
python -m benchmarks.packages --check  # exits with 1 where a bound is missed, and names the rows

The models are tiny and their weights random. Of each way to run one:

float32 FLOPs   share of the FLOPs of matmuls, forward and backward, that have a float32 operand.
                Port: at most 1%.
outputs,        relative L2 error beside the model in float32; the median of the draws. Port: at
gradients       most 1.1 times that of the model's own option, or of autocast where it has none, or
                one that leaves more than 1% in float32.
import swap     whether parameters, outputs and gradients in float32 are the same bits where the
                package's imports of `flax.linen` and `flax.nnx` are replaced by ours.

The table has the errors of the port, and beside them those of its bound. Other bounds that are
missed are listed below it.

A model that fails is a row with the first line of its error.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import marked_parser, shown_table
from benchmarks.packages import environment
from benchmarks.packages.families import FAMILIES
from benchmarks.packages.measure import SEEDS, Figures
from benchmarks.packages.rows import IDENTICAL, Row, table

PAGE = environment.ROOT / "docs" / "ports.md"
Found = dict[str, dict[str, Any]]


def rows(python: Path, only: Sequence[str], swap: bool = True) -> Iterator[Row]:
    """Measures models in an environment, a process for each family, and yields their rows."""
    for family in FAMILIES:
        measured = _run(python, family, only)
        ours = _run(python, family, only, "--swapped") if swap else {}
        for name, found in measured.items():
            ways = {
                way: each if isinstance(each, str) else Figures(**each)
                for way, each in found["ways"].items()
            }
            yield Row(name, ways, difference(found, ours.get(name)) if swap else "")


def _run(python: Path, family: str, only: Sequence[str], *flags: str) -> Found:
    """Runs a family in a process of its own. A process that dies is a row of its own, after those
    it had written.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        names = ["--only", *only] if only else []
        status = environment.run(
            python, ["benchmarks.packages.run", family, str(file), *flags, *names]
        )
        found: Found = json.loads(file.read_text()) if file.exists() else {}
    if status:
        found[f"{family}: process"] = {"ways": {"float32": f"exits with {status}"}, "digests": {}}
    return found


def difference(flax: dict[str, Any], ours: dict[str, Any] | None) -> str:
    """Returns what differs between a model as it was measured with Flax's modules and with ours, or
    `IDENTICAL`.
    """
    for measured in (flax, ours):
        if measured is None or "float32" in measured["ways"]:
            return "not run" if measured is None else measured["ways"]["float32"]
    one, other = flax["digests"], (ours or flax)["digests"]
    if one.keys() != other.keys():
        return f"{len(one)} arrays with Flax's modules, {len(other)} with ours"
    differing = [name for name, digest in one.items() if other[name] != digest]
    return (
        f"differs in {len(differing)} of {len(one)} arrays, as {differing[0]}"
        if differing
        else IDENTICAL
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 1 where a bound is missed under ``--check``, else
    0.
    """
    parser = marked_parser(__doc__, PAGE)
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="FOLDER",
        help="where to make the environment and keep it",
    )
    parser.add_argument(
        "--clones", type=Path, metavar="FOLDER", help="clones of the trainers' repositories"
    )
    parser.add_argument("--no-swap", action="store_true", help="leave out the import swap")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file to write every row to")
    options = parser.parse_args(arguments)
    if options.write and options.only:
        parser.error("--write replaces the whole table: leave out --only")
    with tempfile.TemporaryDirectory() as folder:
        where = (options.environment or Path(folder)).absolute()
        python = environment.make(where, options.clones)
        found: list[Row] = []
        for row in rows(python, options.only, not options.no_swap):
            found.append(row)
            if options.json is not None:  # all that there are, should it be stopped
                options.json.write_text(
                    json.dumps([dataclasses.asdict(row) for row in found], indent=1) + "\n"
                )
    missed = [f"{row.name} ({', '.join(row.missed())})" for row in found if any(row.missed())]
    how = f"Medians of {len(SEEDS)} draws:"
    return shown_table(options, PAGE, "packages", how, table(found), missed)


if __name__ == "__main__":
    sys.exit(main())

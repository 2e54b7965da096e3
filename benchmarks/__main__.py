"""Every table of benchmarks, each in a process of its own: the costs of a policy beside those of
its alternatives.

python -m benchmarks                   # all that need no GPU: 40 minutes on two idle cores
python -m benchmarks --check           # exits with 1 where a bound is missed, and names the rows
python -m benchmarks --quick --check   # counts alone, of small models: under 3 minutes; the same on
                                       # every run
python -m benchmarks --only models     # one table, or several: --only models --only scale
python -m benchmarks --write           # stores the rows in benchmarks/results, and writes
                                       # docs/benchmarks.md, accuracy.md and convergence.md
python -m benchmarks.page              # measures nothing: docs/benchmarks.md of the stored rows
python -m benchmarks --json FILE       # the rows of all as JSON, with date, device and versions
python -m benchmarks gpu               # at most 8 minutes on a GPU
python -m benchmarks eight_bits        # errors, training and a published model in 8 bits: 30
                                       # minutes
python -m benchmarks accel             # programs as TPUs and GPUs get them, compiled without one: 2
                                       # hours
python -m benchmarks accel --only models layers --on v5e  # some of its tables, on some chips
python -m benchmarks estimates         # train steps on a v5e chip, 256 of them and 8 H100s: an hour
                                       # and a half
python -m benchmarks estimates --only resnet --on h100:8 --write  # some, into docs/estimates.md
python -m benchmarks memory            # what ten train steps take, beside the estimate: 3 minutes
python -m benchmarks memory --on here  # on the GPU or TPU at hand
python -m benchmarks packages --write  # packages' and trainers' models into docs/ports.md; installs
                                       # them: 20 minutes
python -m benchmarks packages --only griffin e3x  # some of them
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.command import exit_status, parser, run_table


@dataclasses.dataclass(frozen=True)
class Table:
    """A table's command and its arguments.

    Attributes:
      module: `python -m module`, which takes ``--json FILE``.
      what: in a line.
      check: the arguments with which it exits with 1 where a bound is missed; () if it always does.
      quick: the arguments of its quick run; None if it has none.
      by_default: whether it runs where no names are given.
      writes: whether its command takes ``--write``, and writes a page of its own.
    """

    module: str
    what: str
    check: tuple[str, ...] = ("--check",)
    quick: tuple[str, ...] | None = None
    by_default: bool = True
    writes: bool = False


ACCEL, PACKAGES, ESTIMATES, MEMORY = "accel", "packages", "estimates", "memory"
TABLES = {
    ACCEL: Table(
        "benchmarks.accel",
        "programs as TPUs and GPUs get them",
        quick=("--quick",),
        by_default=False,
    ),
    "models": Table(
        "benchmarks.models",
        "models beside Flax with its dtypes threaded by hand",
        quick=("--small",),
    ),
    "layers": Table("benchmarks.layers", "layers, the repaired ones apart", quick=("--small",)),
    "autocast": Table(
        "benchmarks.autocast",
        "autocast beside dtypes threaded by hand",
        quick=("--small", "--counts"),
    ),
    "ports": Table(
        "benchmarks.ports", "time to trace Flax models under apply_policy", quick=("--small",)
    ),
    "optimizer": Table(
        "benchmarks.optimizer", "a step's bytes beside Optax, jmp and mpx", quick=("--small",)
    ),
    "exchange": Table("benchmarks.all_reduce", "exchanges of data parallel training", quick=()),
    "scale": Table("benchmarks.scale", "how traced programs grow with layers", quick=("--small",)),
    "inspection": Table("benchmarks.inspection", "costs of audit and compare"),
    "own_code": Table(
        "benchmarks.own_code",
        "models' own code under a policy",
        quick=("--counts",),
        writes=True,
    ),
    "accuracy": Table(
        "benchmarks.accuracy", "layers and functions in ulps", check=(), quick=None, writes=True
    ),
    "convergence": Table(
        "benchmarks.convergence",
        "where training ends by storage mode",
        check=(),
        quick=None,
        writes=True,
    ),
    "eight_bits": Table(
        "benchmarks.eight_bits",
        "errors, training and a published model in 8 bits",
        quick=("--quick",),
        by_default=False,
        writes=True,
    ),
    "moments": Table(
        "benchmarks.moments", "where training ends by the dtype of moments", quick=None
    ),
    MEMORY: Table(
        "benchmarks.memory",
        "the memory of train steps beside its estimate",
        quick=None,
        by_default=False,
    ),
    PACKAGES: Table(
        "benchmarks.packages",
        "models of packages and trainers in bfloat16",
        quick=None,
        by_default=False,
        writes=True,
    ),
    ESTIMATES: Table(
        "benchmarks.estimates",
        "costs of train steps under policies",
        check=(),
        quick=("--quick",),
        by_default=False,
        writes=True,
    ),
    "gpu": Table(
        "benchmarks.gpu",
        "tokens and images a second, memory, bandwidth",
        check=(),
        by_default=False,
    ),
}


def chosen(names: Sequence[str], quick: bool) -> dict[str, Table]:
    """Returns the tables of these names, or those that run by default.

    Raises:
      ValueError: a name that is none's; a quick run of a table that has none.
    """
    for name in names:
        if name not in TABLES:
            raise ValueError(f"There is no table {name!r}. Tables: {', '.join(TABLES)}.")
        if quick and TABLES[name].quick is None:
            has_one = ", ".join(name for name, table in TABLES.items() if table.quick is not None)
            raise ValueError(f"The table {name!r} has no quick run. Those with one: {has_one}.")
    if names:
        return {name: TABLES[name] for name in names}
    return {n: t for n, t in TABLES.items() if t.by_default and not (quick and t.quick is None)}


def run(
    name: str, table: Table, quick: bool, check: bool, more: Sequence[str] = ()
) -> tuple[int, Any]:
    """Runs a table's command with arguments of its own. Returns its exit status and its rows."""
    arguments = [*((table.quick or ()) if quick else ()), *(table.check if check else ()), *more]
    return run_table(name, f"{name}: {table.what}", table.module, arguments)


def _write(
    tables: dict[str, Any], json_file: Path | None, markdown_file: Path | None, stores: bool
) -> None:
    named = [name for name in page.NAMES if tables.get(name)] if stores else []
    if json_file is None and markdown_file is None and not named:
        return
    compilers = {}
    if ACCEL in tables:
        from benchmarks.accel import (
            baseline,  # before JAX, which it tells that nothing runs on an accelerator
        )

        compilers = baseline.compilers()
    from benchmarks.accuracy.report import (
        environment,  # imports JAX, which the tables' own processes are to do alone
    )

    where = environment() | compilers
    if json_file is not None:
        json_file.write_text(json.dumps({"environment": where, "tables": tables}, indent=1) + "\n")
    if markdown_file is not None:
        shown = {name: {"environment": where, "rows": rows} for name, rows in tables.items()}
        markdown_file.write_text(page.markdown(shown))
    for name in named:
        page.store(name, where, tables[name])
    if named:
        page.PAGE.write_text(page.markdown(page.stored()))


def _of_one(options: argparse.Namespace) -> list[str]:
    """The arguments of accel, packages, estimates or memory, taken from the options: ``--only``
    then names tables, models or steps of theirs.
    """
    given = {"--only": options.only, "--on": options.on}
    options.only = []
    chosen = [part for flag, names in given.items() if names for part in (flag, *names)]
    return [*chosen, *(["--record"] if options.record else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Returns:
      1 where a table fails, or misses a bound under ``--check``; 2 for unknown names; else 0.
    """
    command = parser("benchmarks", __doc__)
    command.add_argument("names", nargs="*", metavar="NAME", help=f"tables: {', '.join(TABLES)}")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="a file to write a page to")
    command.add_argument(
        "--write",
        action="store_true",
        help="store the rows, and write the pages that are made of them",
    )
    options = command.parse_args(arguments)
    own = next((name for name in (ACCEL, PACKAGES, ESTIMATES, MEMORY) if name in options.names), "")
    if (options.on and own not in (ACCEL, ESTIMATES, MEMORY)) or (options.record and own != ACCEL):
        command.error(
            "--on is of the tables accel, estimates and memory, and --record of accel: "
            "python -m benchmarks accel --on v5e"
        )
    if options.write and (options.quick or (own == MEMORY and options.only)):
        command.error("--write stores whole tables: leave --quick, and --only of memory, out")
    more = _of_one(options) if own else []
    try:
        tables = chosen([*options.names, *options.only], options.quick)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results, failed = {}, []
    for name, table in tables.items():
        writes = ["--write"] if options.write and table.writes else []
        arguments_of_table = [*(more if name == own else ()), *writes]
        status, results[name] = run(name, table, options.quick, options.check, arguments_of_table)
        if status == 2:  # what it needs is not there, and it said so
            return 2
        failed += [name] if status else []
    _write(results, options.json, options.markdown, options.write)
    return exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Programs as TPUs and GPUs get them, compiled on a machine that has neither: ours beside by hand,
and their bounds.

    python -m benchmarks accel                         # every table: 2 hours on two idle cores
    python -m benchmarks accel --check                 # exits with 1 where a bound is missed, or a
                                                       # baseline got dearer
    python -m benchmarks accel --quick --check         # small programs for v5e and an H100: at most
                                                       # 3 minutes
    python -m benchmarks accel --only models --on v5e  # one table, or several, and one chip's rows
    python -m benchmarks accel --record                # writes the baselines' figures to
                                                       # benchmarks/accel/baseline.json

models      value_and_grad of models in both APIs, beside Flax's with dtype=bfloat16, and autocast
layers      layers alone
optimizer   optimizer steps, beside Optax, jmp and mpx
sharded     a whole training step, fully sharded
eight_bits  matmuls in 8 bits beside bfloat16, by width
cache       decode steps with keys and values in 8 bits beside bfloat16
accumulators
            gradients that are accumulators beside those that were rounded

It needs the compilers, which `pip install 'mpmodules[accel]'` installs on x86 Linux, and no
accelerator.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.accel import baseline, targets
from benchmarks.command import exit_status, parser, run_table
from benchmarks.table import Row, line, missed_line


@dataclasses.dataclass(frozen=True)
class Table:
    """A module with `rows(small)` and the command line of `benchmarks.table.run`.

    Attributes:
      module: its name.
      chips: those that it has rows of.
    """

    module: str
    chips: tuple[str, ...]


TABLES = {
    "models": Table("benchmarks.accel.models", tuple(targets.CHIPS)),
    "layers": Table("benchmarks.accel.layers", tuple(targets.CHIPS)),
    "optimizer": Table("benchmarks.accel.optimizer", ("v5e",)),
    "sharded": Table("benchmarks.accel.sharded", ("v5e",)),
    "eight_bits": Table("benchmarks.accel.eight_bits", tuple(targets.CHIPS)),
    "cache": Table("benchmarks.accel.cache", tuple(targets.CHIPS)),
    "accumulators": Table("benchmarks.accel.accumulators", tuple(targets.CHIPS)),
}
QUICK = ("models", "layers", "optimizer")


def chosen(
    only: Sequence[str], on: Sequence[str] = (), quick: bool = False
) -> dict[str, list[str]]:
    """Returns the tables of these names, or all, each with those of the targets `on` that it has
    rows of.

    Raises:
      ValueError: an unknown name, or targets that no table has rows of.
    """
    for name in only:
        if name not in TABLES:
            raise ValueError(
                f"There is no table {name!r} of accelerators. Tables: {', '.join(TABLES)}."
            )
    names = [name for name in TABLES if (name in only if only else name in QUICK or not quick)]
    kinds = {name: targets.Target(name).kind for name in on}
    found = {
        name: [target for target in on if kinds[target] in TABLES[name].chips] for name in names
    }
    if on and not any(found.values()):
        known = "; ".join(f"{name}: {', '.join(TABLES[name].chips)}" for name in names)
        raise ValueError(f"No table has rows of {', '.join(on)}. Chips: {known}.")
    return {name: found[name] for name in names if found[name] or not on}


def takes_targets(name: str) -> bool:
    """Returns whether a table's command takes ``--on``."""
    return "on" in inspect.signature(importlib.import_module(TABLES[name].module).rows).parameters


def _compilers_of(on: Sequence[str]) -> None:
    """Loads the compilers of these targets, or of both platforms.

    Raises:
      RuntimeError: one is not installed.
    """
    for name in on or ("v5e:1x1", "h100"):
        _ = targets.Target(name).devices


def run(name: str, on: Sequence[str], quick: bool, check: bool) -> tuple[int, list[dict[str, Any]]]:
    """Runs a table in a process of its own. Returns its exit status and its rows."""
    arguments = [*(["--small"] if quick else []), *(["--check"] if check else [])]
    if on and takes_targets(name):
        arguments += ["--on", *on]
    # The GPU's compiler can't read back what it writes to JAX's cache, and a program is not to be
    # of another day.
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    status, rows = run_table(name, name, TABLES[name].module, arguments, environment)
    return status, rows or []


def _beside_recorded(tables: dict[str, list[dict[str, Any]]], *, records: bool) -> list[Row]:
    """Compares the baselines with the recorded ones, prints the dearer and the missing ones, and
    returns the rows.
    """
    rows, absent = baseline.beside_recorded(tables, baseline.load())
    dearer = [row for row in rows if row.is_missed]
    print(
        f"\n== baseline: {len(rows)} figures beside the recorded ones, {len(dearer)} of them "
        "dearer",
        flush=True,
    )
    for row in dearer:
        print(line(row))
    for where in absent if not records else ():
        print(where)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Returns:
      1 where a table fails, or under ``--check`` a bound is missed or a baseline got dearer; 2 for
      unknown names, or where a compiler is not installed; else 0.
    """
    options = parser("benchmarks accel", __doc__).parse_args(arguments)
    try:
        names = chosen(options.only, options.on, options.quick)
        _compilers_of(options.on)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    tables, failed = {}, []
    for name, on in names.items():
        status, tables[name] = run(name, on, options.quick, options.check)
        failed += [name] if status else []
    # A quick table's rows may have the names of larger ones.
    baselines = {f"{name}, quick" if options.quick else name: rows for name, rows in tables.items()}
    compared = _beside_recorded(baselines, records=options.record)
    for row in (row for row in compared if row.is_missed and options.check):
        print(f"dearer than recorded: {missed_line(row)}", file=sys.stderr)
        failed = [*failed, "baseline"] if "baseline" not in failed else failed
    if options.record:
        baseline.record(baselines)
    if options.json:
        every = tables | {"baseline": [row.as_json() for row in compared]}
        flat = [{"table": name, **row} for name, rows in every.items() for row in rows]
        options.json.write_text(json.dumps(flat, indent=1) + "\n")
    return exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())

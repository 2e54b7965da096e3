"""The baseline's absolute figures as they were recorded: Flax's and Optax's programs are not to get
dearer unseen.

They are keyed by the compiler's version, target, table and row. Only a figure of the same compiler
is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import version_of
from benchmarks.table import Row
from policy.inspect.estimate.targets import Target

FILE = Path(__file__).with_name("baseline.json")
QUANTITIES = ("cycles", "bytes", "temporary")
DEARER = 1.02
Recorded = dict[str, dict[str, dict[str, dict[str, dict[str, float]]]]]


COMPILERS = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}


def compilers() -> dict[str, str]:
    """Returns the versions of the accelerators' compilers, by package."""
    return {name: version_of(name) for name in COMPILERS.values()}


def compiler(target: str) -> str:
    """Names the compiler of a target, with JAX's version and its own."""
    return ", ".join(
        f"{name} {version_of(name)}" for name in ("jax", COMPILERS[Target(target).chip.platform])
    )


def load(file: Path | None = None) -> Recorded:
    """Reads the recorded figures from `FILE` or another file, by compiler, target, table, row and
    quantity.
    """
    file = file or FILE
    return json.loads(file.read_text()) if file.exists() else {}


def record(tables: Mapping[str, Iterable[Mapping[str, Any]]], file: Path | None = None) -> None:
    """Adds the references of these tables' rows to the recorded figures."""
    file = file or FILE
    recorded = load(file)
    for table, rows in tables.items():
        for row in rows:
            if row["target"] and row["quantity"] in QUANTITIES:
                of_target = recorded.setdefault(compiler(row["target"]), {}).setdefault(
                    row["target"], {}
                )
                of_target.setdefault(table, {}).setdefault(row["name"], {})[row["quantity"]] = row[
                    "reference"
                ]
    file.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def beside_recorded(
    tables: Mapping[str, Iterable[Mapping[str, Any]]], recorded: Recorded
) -> tuple[list[Row], list[str]]:
    """Compares the references of tables' rows with the recorded figures.

    Returns:
      A row for each recorded one, its bound `DEARER`, and lines that name the others.
    """
    rows, absent = [], {}
    for table, measured in tables.items():
        for row in measured:
            if not row["target"] or row["quantity"] not in QUANTITIES:
                continue
            version = compiler(row["target"])
            of_table = recorded.get(version, {}).get(row["target"], {}).get(table, {})
            before = of_table.get(row["name"], {}).get(row["quantity"])
            if before is None:
                absent.setdefault(f"{table} on {row['target']} by {version}", set()).add(
                    row["name"]
                )
                continue
            name = f"by hand: {row['name']}"
            rows.append(
                Row(row["quantity"], name, row["reference"], before, DEARER, target=row["target"])
            )
    return rows, [
        f"{len(names)} baselines are not recorded: {where}" for where, names in absent.items()
    ]

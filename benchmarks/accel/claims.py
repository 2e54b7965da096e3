"""Prints sentences on accelerators, with the figures of a run.

python -m benchmarks accel --json rows.json && python -m benchmarks.accel.claims rows.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
# Each is said where the run has its rows: of a table, a quantity and kinds of chips.
SENTENCES = {
    (
        "models",
        "cycles",
    ): "A model's value_and_grad under mixed_bfloat16 takes {ratios} of the cycles on {chips} that "
    "the same model takes in Flax with dtype=bfloat16 in every layer",
    (
        "models",
        "/autocast",
    ): "It takes {ratios} of the cycles, on a GPU of the bytes, of the model under autocast, on "
    "{chips}",
    ("models", "bytes"): "It moves {ratios} of the bytes on {chips}",
    ("models", "temporary"): "Its temporary memory is {ratios} of by hand's on {chips}",
    ("layers", "cycles"): "A layer alone takes {ratios} of Flax's cycles on {chips}",
    (
        "optimizer",
        "cycles",
    ): "A step of the optimizer takes {ratios} of plain optax's cycles on {chips}",
    (
        "sharded",
        "cycles",
    ): "A whole sharded step takes {ratios} of the cycles of one by hand on {chips}",
    ("sharded", "temporary"): "Its temporary memory is {ratios} of by hand's on {chips}",
}


def sentences(rows: Rows) -> list[str]:
    """Returns the sentences that these rows have figures for, each with the name of its dearest
    row.
    """
    said = []
    for (table, quantity), sentence in SENTENCES.items():
        found = [row for row in rows if row["table"] == table and row["quantity"] == quantity]
        if found:
            dearest = max(found, key=lambda row: row["ratio"])
            where = f"{dearest['name']}{', ' + dearest['target'] if dearest['target'] else ''}"
            said.append(
                f"{sentence.format(ratios=_range(found), chips=_chips(found))} (the most: {where})."
            )
    return said


def _range(rows: Iterable[Mapping[str, Any]]) -> str:
    ratios = sorted(row["ratio"] for row in rows)
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"


def _chips(rows: Iterable[Mapping[str, Any]]) -> str:
    return (
        ", ".join(dict.fromkeys(row["target"].split(":")[0] for row in rows if row["target"]))
        or "every chip"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the sentences of the rows of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="written by python -m benchmarks accel --json")
    written = json.loads(parser.parse_args(arguments).file.read_text())
    rows = written if isinstance(written, list) else written["tables"]["accel"]
    print("\n".join(sentences(rows)))


if __name__ == "__main__":
    main()

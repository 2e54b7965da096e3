"""Estimates of published runs: measured, stored as JSON, and read again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import policy
from benchmarks.estimates.published.runs import Run, example

RESULTS = Path(__file__).parents[1] / "results" / "published"
_LARGEST = 12  # module paths that are stored


def measured(run: Run) -> dict[str, Any]:
    """Compiles the step of a run, and returns its estimate as JSON: one row, with the module paths
    that take the most time.

    libtpu reads its flags when it is loaded: call it in a process for each run.
    """
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(run.flags)
    found = policy.estimate(
        example,
        policies={run.name: (run.policy, {"run": run.name})},
        on=run.target,
        mesh=dict(run.mesh) or None,
    )
    whole = json.loads(json.dumps(dataclasses.asdict(found)))
    (row,) = whole["rows"]
    by_cost = sorted(row["cost_by_path"].items(), key=lambda item: -item[1])
    row["cost_by_path"] = dict(by_cost[:_LARGEST])
    row["buffers"] = row["buffers"] if row["is_exhausted"] else []
    return whole


def stored(run: Run) -> dict[str, Any] | None:
    """Returns the stored estimate of a run; None if there is none."""
    file = _file(run)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def store(run: Run, found: Mapping[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    _file(run).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _file(run: Run) -> Path:
    return RESULTS / f"{run.name}.json"

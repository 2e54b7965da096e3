"""Records of a run, as `RunLog` writes them, made by hand."""

import json
import pathlib
from typing import Any

NUMBERS = {
    "largest": 1.0,
    "mean_square": 0.25,
    "smallest": 1e-4,
    **dict.fromkeys(("zeros", "nan", "inf", "below", "above"), 0.0),
}


def row(
    path: str,
    kind: str = "activation",
    dtype: str = "bfloat16",
    *,
    line: str = "model.py:3",
    **numbers: Any,
):
    """Returns a row of 64 ordinary numbers, but for those that are given."""
    given = {"path": path, "kind": kind, "dtype": dtype, "line": line, "size": 64}
    return {**given, "numbers": NUMBERS | numbers}


def first(path: str, operation: str = "exp", **changes: Any) -> dict[str, Any]:
    """Returns the first line that is not finite."""
    given = {"path": path, "direction": "forward", "operation": operation, "line": "model.py:31"}
    nothing = dict.fromkeys(("layer", "examples", "devices", "entered"))
    return {**given, **nothing, "dtype": "float16", **changes}


def record(step: int, *rows: Any, found: Any = None, scale: Any = None, skipped: bool = False):
    reason = "nonfinite" if found else "every"
    given = {"version": 1, "step": step, "reason": reason, "loss_scale": scale, "first": found}
    return {**given, "skipped": skipped, "rows": list(rows)}


def run_of(*rows_at: Any, steps: int = 10, scale: Any = None) -> list[dict[str, Any]]:
    """Returns a record of each step, of the rows that functions of the step return."""
    return [record(step, *(row(step) for row in rows_at), scale=scale) for step in range(steps)]


def written(folder: pathlib.Path, records: Any) -> pathlib.Path:
    """Returns the file of a log."""
    file = folder / "run.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return file

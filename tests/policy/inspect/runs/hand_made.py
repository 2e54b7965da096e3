"""Records of a run, as `RunLog` writes them, made by hand."""

import json
import pathlib
from typing import Any

from policy.inspect.monitor.snapshot import VERSION, first_of

NUMBERS = {
    "largest": 1.0,
    "mean_square": 0.25,
    "smallest": 1e-4,
    **dict.fromkeys(("zeros", "nan", "inf", "below", "above", "lost"), 0.0),
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


def made(path: str, operation: str = "exp", **changes: Any) -> dict[str, Any]:
    """Returns an operation that made an infinity."""
    given = {"path": path, "direction": "forward", "operation": operation, "line": "model.py:31"}
    value = {"dtype": "float16", "value": "inf", "is_fresh": True}
    return {**given, "layer": None, **value, **changes}


def entered(path: str, kind: str = "input") -> dict[str, Any]:
    """Returns an argument that is not finite."""
    return {"path": path, "kind": kind}


def record(
    step: int,
    *rows: Any,
    found: Any = (),
    scale: Any = None,
    skipped: bool = False,
    finite: bool = False,
):
    """Returns a record; of operations and arguments that are not finite, or of a finite step."""
    facts = [found] if isinstance(found, dict) else list(found)
    outputs = ["loss"] if facts and not finite else []
    given: dict[str, Any] = {
        "version": VERSION,
        "step": step,
        "loss_scale": scale,
        "skipped": skipped,
        "outputs": outputs,
        "entered": [one for one in facts if "operation" not in one],
        "made": [one for one in facts if "operation" in one],
    }
    return {**given, "first": first_of(given) if outputs else None, "rows": list(rows)}


def run_of(*rows_at: Any, steps: int = 10, scale: Any = None) -> list[dict[str, Any]]:
    """Returns a record of each step, of the rows that functions of the step return."""
    return [record(step, *(row(step) for row in rows_at), scale=scale) for step in range(steps)]


def written(folder: pathlib.Path, records: Any) -> pathlib.Path:
    """Returns the file of a log."""
    file = folder / "run.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return file

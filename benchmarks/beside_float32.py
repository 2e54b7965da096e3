"""Two of the examples trained under float32, mixed_bfloat16 and mixed_float16: the second part of
docs/convergence.md.

`python -m benchmarks.convergence --examples --write` trains them. The stored results hold what the
page shows of the JSON that the examples write.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import measured_on, note, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "beside_float32.json"
NOTES = ROOT / "benchmarks" / "notes"
EXAMPLES = {
    "fashion_mnist": "examples/resnet_fashion_mnist.py",
    "language_model": "examples/language_model.py",
}
OPTIONS = ("--compare", "--seeds", "3")
Result = Mapping[str, Any]


def stored() -> dict[str, Result]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def trained(name: str) -> dict[str, Any]:
    """Trains an example under three policies from three seeds, and returns its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, EXAMPLES[name], *OPTIONS, "--json", str(file)]
        subprocess.run(command, check=True, cwd=ROOT)
        written = json.loads(file.read_text())
    return from_fashion_mnist(written) if name == "fashion_mnist" else from_language_model(written)


def from_fashion_mnist(written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of the JSON of `examples/resnet_fashion_mnist.py`."""
    rows = []
    for policy, runs in _by_policy(written["results"]).items():
        last = [float(np.mean(run["losses"][-100:])) for run in runs]
        accuracy = [run["accuracies"][-1][1] for run in runs]
        rows.append(
            _common(policy, runs) | {"accuracy": accuracy, "final_loss": float(np.mean(last))}
        )
    return {"environment": _environment(written), "rows": rows}


def from_language_model(written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of the JSON of `examples/language_model.py`."""
    rows = []
    for policy, runs in _by_policy(written["runs"]).items():
        rows.append(
            _common(policy, runs)
            | {
                name: _mean_and_deviation([run[name] for run in runs])
                for name in ("held_out", "final_loss")
            }
        )
    return {"environment": _environment(written), "rows": rows}


def _by_policy(runs: Sequence[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(run["policy"] for run in runs)
    return {name: [run for run in runs if run["policy"] == name] for name in names}


def _common(policy: str, runs: Sequence[Result]) -> dict[str, Any]:
    sizes = ("parameter_bytes", "optimizer_bytes", "activation_bytes")
    return {
        "policy": policy,
        **{name: runs[0][name] for name in sizes},
        "skipped": [run["skipped"] for run in runs],
        "loss_scale": [run["loss_scales"][-1] for run in runs],
        "seconds": float(np.mean([run["seconds"] for run in runs])),
    }


def _environment(written: Mapping[str, Any]) -> dict[str, str]:
    device = written.get("machine") or ", ".join(written["devices"])
    return {"date": written["date"], "device": device, **written["versions"]}


def _mean_and_deviation(values: Sequence[float]) -> list[float]:
    return [float(np.mean(values)), float(np.std(values, ddof=1))]


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def sections(results: Mapping[str, Result]) -> list[str]:
    """Returns the second part of docs/convergence.md, not wrapped."""
    parts = [note(NOTES, "convergence_examples")]
    for name, lines in (("fashion_mnist", _fashion_mnist), ("language_model", _language_model)):
        one = results[name]
        command = f"python {EXAMPLES[name]} {' '.join(OPTIONS)}"
        parts += [note(NOTES, f"convergence_{name}"), f"```bash\n{command}\n```"]
        parts += [f"{measured_on(one['environment'])} {one.get('remark', '')}", *lines(one)]
    return [part.strip() for part in parts]


def _fashion_mnist(result: Result) -> list[str]:
    full, *halves = result["rows"]
    head = ["policy", "test accuracy", "final loss", "activations KiB", "skipped steps"]
    rows, lines = [], []
    for row in result["rows"]:
        mean, deviation = _mean_and_deviation(row["accuracy"])
        cells = [row["policy"], f"{mean:.2%} ± {deviation:.2%}", f"{row['final_loss']:.4f}"]
        rows.append([*cells, *_cells(row)])
    mean, deviation = _mean_and_deviation(full["accuracy"])
    for row in halves:
        other, other_deviation = _mean_and_deviation(row["accuracy"])
        error = _standard_error(deviation, other_deviation, len(row["accuracy"]))
        lines.append(
            f"- {row['policy']}: {other - mean:+.2%}, standard error {error:.2%}: "
            f"{_verdict(other - mean, error)}"
        )
    return [table(head, rows), "\n".join(lines)]


def _language_model(result: Result) -> list[str]:
    full, *halves = result["rows"]
    head = ["policy", "held-out nats/char", "final loss", "activations KiB", "skipped steps"]
    rows = [
        [
            row["policy"],
            *(f"{row[name][0]:.4f} ± {row[name][1]:.4f}" for name in ("held_out", "final_loss")),
            *_cells(row),
        ]
        for row in result["rows"]
    ]
    lines = []
    for row in halves:
        difference = row["held_out"][0] - full["held_out"][0]
        error = _standard_error(full["held_out"][1], row["held_out"][1], len(row["skipped"]))
        lines.append(
            f"- {row['policy']}: {difference:+.4f} nats a character, standard error {error:.4f}: "
            f"{_verdict(difference, error)}"
        )
    return [table(head, rows), "\n".join(lines)]


def _cells(row: Result) -> list[str]:
    return [f"{row['activation_bytes'] / 1024:.0f}", ", ".join(map(str, row["skipped"]))]


def _standard_error(first: float, second: float, seeds: int) -> float:
    """Returns the standard error of the difference of two means, of the pooled deviation."""
    return math.sqrt((first**2 + second**2) / 2) * math.sqrt(2 / seeds)


def _verdict(difference: float, error: float) -> str:
    within = "within" if abs(difference) <= 2 * error else "**not within**"
    return f"{within} the noise of float32"

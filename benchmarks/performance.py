"""docs/performance.md, made of stored results: the estimates of train steps and the tables of
benchmarks.

    python -m benchmarks.performance  # measures nothing: writes the page

The text is benchmarks/notes/performance.md; ``{{ tpu }}`` in it stands for a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.estimates import page as estimates_page
from benchmarks.estimates.tables import stored as stored_estimate
from benchmarks.estimates.tables import tables as estimate_tables
from benchmarks.markdown import note, table, wrapped
from benchmarks.page import HERE, NOTES, stored

PAGE = HERE.parent / "docs" / "performance.md"
POLICIES = ("float32", "mixed_bfloat16", "bfloat16")
PIPELINES = (
    "f32 / bf16, no skipping",
    "f32 / bf16",
    "f32 / bf16, clipped",
    "full masters, bf16 / bf16",
    "remainder, bf16 / bf16",
    "stochastic",
    "optax.apply_if_finite, f32 / bf16",
    "jmp: unscale, select, f32 / bf16",
)


def page() -> str:
    """Returns the page."""
    text = note(NOTES, "performance")
    return wrapped(re.sub(r"\{\{ (\w+) \}\}", lambda found: TABLES[found[1]](), text)) + "\n"


def steps(*targets: str) -> str:
    """Returns the table of milliseconds of train steps, by the stored estimates."""
    lines = []
    for of in estimate_tables(on=targets):
        found = stored_estimate(of)
        if found is None:
            continue
        by_name = {row["name"]: row for row in found["rows"]}
        step = f"{of.model.title}, {estimates_page.place(found)}"
        lines.append([step, *(_milliseconds(by_name[name]) for name in POLICIES)])
    return table(["ms", *POLICIES], lines)


def _milliseconds(row: Mapping[str, Any]) -> str:
    seconds = estimates_page.total_seconds(row)
    return "no room" if seconds is None else estimates_page.milliseconds(seconds)


def by_hand() -> str:
    """Returns the table of models beside the same by hand, by chip: the smallest and the largest
    ratio.
    """
    tables = stored()
    models = [row for row in tables["accel"]["rows"] if row["table"] == "models"]
    rows = [
        [
            target,
            *(
                _range(r["ratio"] for r in models if (r["target"], r["quantity"]) == (target, name))
                for name in ("cycles", "bytes", "temporary")
            ),
            "",
        ]
        for target in ("v5e:2x2", "v6e:2x2", "h100")
    ]
    on_cpu = [
        _range(r["ratio"] for r in tables["models"]["rows"] if r["quantity"] == name)
        for name in ("c-bytes", "temp", "seconds")
    ]
    rows.append(["cpu", "", *on_cpu])
    return table(["ours / by hand", "cycles", "bytes", "temporary memory", "seconds"], rows)


def _range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}" if found else ""


def optimizer() -> str:
    """Returns the table of optimizer steps on a v5e chip and on a CPU, beside plain Optax."""
    tables = stored()
    cycles = {
        row["name"]: row["ratio"]
        for row in tables["accel"]["rows"]
        if (row["table"], row["quantity"]) == ("optimizer", "cycles")
    }
    nanoseconds = {
        row["name"]: row["ratio"] for row in tables["optimizer"]["rows"] if row["quantity"] == "ns"
    }
    rows = [
        [name, *(f"{of[name]:.2f}" if name in of else "" for of in (cycles, nanoseconds))]
        for name in PIPELINES
    ]
    return table(["ours / plain Optax", "cycles, v5e", "nanoseconds, CPU"], rows)


def beside_autocast() -> str:
    """Returns the range of cycles of models beside the same under autocast, on TPUs."""
    return _range(
        row["ratio"]
        for row in stored()["accel"]["rows"]
        if (row["table"], row["quantity"]) == ("models", "/autocast")
    )


def tracing() -> str:
    """Returns the range of the time to trace models with normalizations, beside by hand."""
    return _range(
        row["ratio"]
        for row in stored()["models"]["rows"]
        if row["quantity"] == "tracing" and not row["name"].startswith("MLP")
    )


TABLES: dict[str, Callable[[], str]] = {
    "tpu": lambda: steps("v5e:16x16"),
    "gpu": lambda: steps("h100:8"),
    "by_hand": by_hand,
    "optimizer": optimizer,
    "beside_autocast": beside_autocast,
    "tracing": tracing,
}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""docs/performance.md, made of stored results: the estimates of train steps, the tables of
benchmarks, and the two examples beside float32.

    python -m benchmarks.performance  # measures nothing: writes the page

The text is benchmarks/notes/performance.md; ``{{ tpu }}`` in it stands for a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from benchmarks import beside_float32
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
    "kahan",
    "stochastic",
    "optax.apply_if_finite, f32 / bf16",
    "jmp: unscale, select, f32 / bf16",
    "mpx: unscale, select, f32 / bf16",
)


def page() -> str:
    """Returns the page."""
    text = note(NOTES, "performance")
    return wrapped(re.sub(r"\{\{ (\w+) \}\}", lambda found: TABLES[found[1]](), text)) + "\n"


def steps(*targets: str) -> str:
    """Returns the table of train steps on these targets, by the stored estimates."""
    head = ["step", *(f"{name}, ms" for name in POLICIES), "float32 / mixed_bfloat16"]
    head += [f"{name}, GiB" for name in POLICIES]
    rows = []
    for of in estimate_tables(on=targets):
        found = stored_estimate(of)
        if found is None:
            continue
        by_name = {row["name"]: row for row in found["rows"]}
        seconds = [estimates_page.total_seconds(by_name[name]) for name in POLICIES]
        ratio = seconds[0] / seconds[1] if seconds[0] and seconds[1] else None
        rows.append(
            [
                f"{of.model.title}, {estimates_page.place(found)}",
                *("no room" if s is None else estimates_page.milliseconds(s) for s in seconds),
                "" if ratio is None else f"{ratio:.2f}",
                *(estimates_page.gib(by_name[name]["memory"]) for name in POLICIES),
            ]
        )
    return table(head, rows)


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
    return table(["beside plain Optax", "cycles, v5e", "nanoseconds, CPU"], rows)


def examples() -> str:
    """Returns the table of the two examples on a CPU."""
    head = ["example", "policy", "seconds", "activations kept for backward, KiB"]
    names = {"fashion_mnist": "ResNet8, Fashion-MNIST", "language_model": "decoder, King James"}
    rows = []
    for name, title in names.items():
        result = beside_float32.stored()[name]
        for row in result["rows"]:
            seconds = f"{row['seconds']:.0f}" if result.get("seconds_compare", True) else ""
            rows.append([title, row["policy"], seconds, f"{row['activation_bytes'] / 1024:.0f}"])
    return table(head, rows, left=2)


def beside_autocast() -> str:
    """Returns the range of cycles of models beside the same under autocast, on TPUs."""
    return _range(
        row["ratio"]
        for row in stored()["accel"]["rows"]
        if (row["table"], row["quantity"]) == ("models", "/autocast")
    )


def tracing() -> str:
    """Returns the range of the time to trace models with normalisations, beside by hand."""
    return _range(
        row["ratio"]
        for row in stored()["models"]["rows"]
        if row["quantity"] == "tracing" and not row["name"].startswith("MLP")
    )


TABLES: dict[str, Callable[[], str]] = {
    "tpu": lambda: steps("v5e:1x1", "v5e:16x16"),
    "gpu": lambda: steps("h100:8"),
    "by_hand": by_hand,
    "optimizer": optimizer,
    "cpu": examples,
    "beside_autocast": beside_autocast,
    "tracing": tracing,
}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

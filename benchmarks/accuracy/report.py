"""What is wrong with a row, and the table as text, JSON and Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
from typing import Any

import jax

from benchmarks.accuracy import torch_peer
from benchmarks.accuracy.cases import OURS, PEERS, PROMISED, Precision, Row

TIE = 0.1  # ulps; what is correctly rounded but for float32's own error scatters by less
RELATIVE_TIE = (
    0.1  # of the best peer: two orders of summation of the same accuracy differ by this much
)
FLOAT32 = 32.0  # ulps of float32: what sums of thousands leave in one order or another, 4e-6
COLUMNS: tuple[str, ...] = (*OURS, *PEERS)


def complaints(row: Row) -> list[str]:
    """In words, what a row breaks: the promise of its family, or that ours is never worse than the
    best peer.
    """
    ours, best, broken = row.worst_of_ours, row.best_of_peers, []
    promise = FLOAT32 if row.precision.wide else 1.0
    if row.case.family in PROMISED and not ours <= promise:
        broken.append(f"{ours:.3g} ulps, where {row.case.family} are to be within {promise:g}")
    if best is not None and not ours <= allowed(best, row.precision.wide):
        broken.append(f"{ours:.3g} ulps, where the best of the others has {best:.3g}")
    return broken


def allowed(best: float, wide: bool = False) -> float:
    """What ours may have where the best of the others has `best`: a tie, or what rounding once
    gives anybody.
    """
    return max(FLOAT32, 2 * best) if wide else max(best + TIE, best * (1 + RELATIVE_TIE), 0.5 + TIE)


def number(value: float | None) -> str:
    if value is None:
        return "raises"
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def environment() -> dict[str, str]:
    """Date, versions and device, as the report states them."""
    packages = ["mpmodules", "jax", "flax", "optax", "torch"]
    versions: dict[str, str] = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "0.1.0 (from source)" if name == "mpmodules" else "not installed"
    device = jax.devices()[0]
    where = f"{device.device_kind} ({device.platform}), {platform.machine()}"
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **versions,
        "device": where,
    }


def about_torch() -> str:
    if torch_peer.available():
        return (
            "torch: under CPU autocast; blank where it has no such layer or function, or the row "
            "was not written."
        )
    return (
        "torch is not installed, so its column is empty: `pip install torch` and run the command "
        "again."
    )


def columns_of(rows: list[Row]) -> list[str]:
    return [
        column for column in COLUMNS if column == "torch" or any(column in row.ulps for row in rows)
    ]


def sections(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by precision, and by whether they are a wing's layers or functions."""
    found: dict[tuple[Precision, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row.precision, "ours" in row.ulps), []).append(row)
    order = sorted(found, key=lambda key: (key[0].wide, str(key[0]), key[1]))
    return [(f"{key[0]}, {'functions' if key[1] else 'layers'}", found[key]) for key in order]


def text(rows: list[Row]) -> str:
    """The table for a terminal."""
    lines: list[str] = []
    for title, part in sections(rows):
        columns = columns_of(part)
        width = max(len(str(row.case)) for row in part)
        lines += ["", title, " " * width + "".join(f"{column:>13}" for column in columns)]
        for row in part:
            cells = "".join(f"{_cell(row, column):>13}" for column in columns)
            lines.append(f"{row.case!s:{width}}{cells}{'  WORSE' if complaints(row) else ''}")
    return "\n".join(lines)


def _cell(row: Row, column: str) -> str:
    return number(row.ulps[column]) if column in row.ulps else ""


def markdown(rows: list[Row], notes: str) -> str:
    """The text of docs/accuracy.md."""
    stated = ", ".join(
        f"{name} {value}" for name, value in environment().items() if name not in ("date", "device")
    )
    lines = [
        "# Accuracy",
        "",
        "Made by `python -m benchmarks.accuracy --markdown docs/accuracy.md`.",
        "",
        f"{environment()['date']}, on {environment()['device']}, with {stated}.",
        "",
        notes.strip(),
        "",
        about_torch(),
        "",
        summary(rows),
    ]
    for title, part in sections(rows):
        columns = columns_of(part)
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines += [
            f"| case | inputs | {' | '.join(columns)} |",
            "|---|---|" + "---:|" * len(columns),
        ]
        for row in part:
            cells = " | ".join(_cell(row, column) for column in columns)
            lines.append(
                f"| {row.case.name}{' **!**' if complaints(row) else ''} | {row.case.inputs} | "
                f"{cells} |"
            )
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    """Whether everything holds, and the rows where it does not."""
    broken = [(row, complaint) for row in rows for complaint in complaints(row)]
    lines = [f"All {len(rows)} rows hold."]
    if broken:
        lines = [f"{len({id(row) for row, _ in broken})} of {len(rows)} rows do not hold:", ""]
        lines += [f"- {row.case}, {row.precision}: {complaint}" for row, complaint in broken]
    for reason in dict.fromkeys(row.case.accepted for row in rows if accepted(row)):
        names = dict.fromkeys(
            row.case.name for row in rows if accepted(row) and row.case.accepted == reason
        )
        lines += ["", f"Accepted, {'; '.join(names)}: {reason}."]
    return "\n".join(lines)


def accepted(row: Row) -> bool:
    """Whether ours is worse than a column that the case has a reason to be worse than."""
    others = [row.ulps.get(column) for column in row.case.against] if row.case.accepted else []
    return any(
        value is not None and row.worst_of_ours > allowed(value, row.precision.wide)
        for value in others
    )


def as_json(rows: list[Row]) -> dict[str, Any]:
    """All measurements; a column that raised is null, an infinite error the text "inf"."""
    return {
        "environment": environment(),
        "rows": [
            {
                "case": row.case.name,
                "inputs": row.case.inputs,
                "family": row.case.family,
                "precision": str(row.precision),
                "ulps": {
                    name: "inf" if value is not None and math.isinf(value) else value
                    for name, value in row.ulps.items()
                },
                "complaints": complaints(row),
            }
            for row in rows
        ],
    }

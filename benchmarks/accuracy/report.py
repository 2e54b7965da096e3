"""Checks rows against their bounds, and writes the table as text, JSON and Markdown."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks.accuracy import torch_peer
from benchmarks.accuracy.cases import OURS, PEERS, PROMISED, Precision, Row
from benchmarks.markdown import cores, measured_on, table, version_of, wrapped

Record = Mapping[str, Any]  # "environment" and "rows"
Recorded = Mapping[str, Any]  # a row of a record

TIE = 0.1  # ulps; results that are rounded once from float32 scatter by less
RELATIVE_TIE = (
    0.1  # of the best peer: two orders of summation of the same accuracy differ by this much
)
FLOAT32 = 32.0  # ulps of float32, 4e-6: the effect of the order of a sum of thousands
COLUMNS: tuple[str, ...] = (*OURS, *PEERS)
SHOWN = "Bfloat16"  # the sections whose rows are on the page
FACTOR = 4  # a case is on the page where another column has this many times the error of ours


def complaints(row: Row) -> list[str]:
    """Returns the bounds that a row misses: that of its family, or the best of the others."""
    ours, best, broken = row.worst_of_ours, row.best_of_peers, []
    promise = FLOAT32 if row.precision.wide else 1.0
    if row.case.family in PROMISED and not ours <= promise:
        broken.append(f"{ours:.3g} ulps, where {row.case.family} are to be within {promise:g}")
    if best is not None and not ours <= allowed(best, row.precision.wide):
        broken.append(f"{ours:.3g} ulps, where the best of the others has {best:.3g}")
    return broken


def allowed(best: float, wide: bool = False) -> float:
    """Returns the largest error allowed where the best of the others has `best`: a tie, or the
    error of one rounding.
    """
    return max(FLOAT32, 2 * best) if wide else max(best + TIE, best * (1 + RELATIVE_TIE), 0.5 + TIE)


def number(value: float | str | None) -> str:
    """Returns an error as tables show it; as in a record, "inf" is a text."""
    if value is None:
        return "raises"
    if isinstance(value, str) or math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def environment() -> dict[str, str]:
    """Returns the date, the versions and the device, as pages state them."""
    packages = ["mpmodules", "jax", "flax", "optax", "torch"]
    versions = {name: version_of(name) for name in packages}
    device = jax.devices()[0]
    kind = device.device_kind
    named = kind if kind == device.platform else f"{kind} ({device.platform})"
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **versions,
        "device": f"{named}, {platform.machine()}",
        "cores": str(cores()),
    }


def about_torch() -> str:
    if torch_peer.available():
        return "torch runs under CPU autocast."
    return (
        "torch is not installed, so its column is empty: `pip install torch` and run the command "
        "again."
    )


def columns_of(rows: list[Row]) -> list[str]:
    return [
        column for column in COLUMNS if column == "torch" or any(column in row.ulps for row in rows)
    ]


def sections(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by precision, and by whether they are an API's layers or functions."""
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


def markdown(record: Record, notes: str) -> str:
    """Returns the text of docs/accuracy.md.

    Args:
      record: as `as_json` returns it.
      notes: what stands before the result.
    """
    where, rows = record["environment"], record["rows"]
    torch = where.get("torch_measured")
    parts = [
        notes,
        measured_on(where) + (f" The torch column was measured on {torch}." if torch else ""),
        _summary(rows),
    ]
    found = _by_section(rows)
    contrasts = [_contrast(title, of) for title, of in found.items() if title.startswith(SHOWN)]
    return wrapped("\n\n".join([*parts, _largest(found), *filter(None, contrasts)])) + "\n"


def _by_section(rows: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Returns recorded rows by the title of their section, in the order of `sections`."""
    keys = {(" from " in row["precision"], row["precision"], "ours" in row["ulps"]) for row in rows}
    return {
        f"{precision[0].upper()}{precision[1:]}, {'functions' if functions else 'layers'}": [
            row
            for row in rows
            if row["precision"] == precision and ("ours" in row["ulps"]) is functions
        ]
        for _, precision, functions in sorted(keys)
    }


def _largest(found: Mapping[str, Sequence[Recorded]]) -> str:
    """Returns the table of the largest error of ours and of the others, by section."""
    lines = []
    for title, rows in found.items():
        errors = {
            mine: [number(max(values)) if (values := _values(rows, mine)) else ""]
            for mine in (True, False)
        }
        lines.append([title, str(len(rows)), *errors[True], *errors[False]])
    return table(["section", "rows", "ours", "the others"], lines)


def _values(rows: Sequence[Recorded], ours: bool) -> list[float]:
    return [
        float(value)
        for row in rows
        for name, value in row["ulps"].items()
        if (name in OURS) is ours and value is not None
    ]


def _contrast(title: str, rows: Sequence[Recorded]) -> str:
    """Returns the table of the cases where another column raises, or has `FACTOR` times the error
    of ours: for each the inputs with the largest error.
    """
    worst: dict[str, tuple[float, Recorded]] = {}
    for row in rows:
        others = [value for name, value in row["ulps"].items() if name not in OURS]
        error = max(math.inf if value is None else float(value) for value in others)
        contrast = error > FACTOR * max(0.5, *_values([row], True))
        if contrast and error > worst.get(row["case"], (0.0, row))[0]:
            worst[row["case"]] = error, row
    if not worst:
        return ""
    titles = dict.fromkeys(_column(name) for name in PEERS for row in rows if name in row["ulps"])
    lines = [
        [
            f"{row['case']}, {row['inputs']}",
            number(max(_values([row], True))),
            *(_largest_cell(row, title) for title in titles),
        ]
        for _, row in worst.values()
    ]
    return f"## {title}\n\n{table(['case, inputs', 'ours', *titles], lines)}"


def _column(peer: str) -> str:
    """Returns the title of a peer's column; the two APIs of Flax share one."""
    return "flax" if peer.startswith("flax") else peer


def _largest_cell(row: Recorded, title: str) -> str:
    """Returns the largest error of the peers in a column, as tables show it."""
    errors = [error for name, error in row["ulps"].items() if _column(name) == title]
    if not errors:
        return ""
    return number(None if None in errors else max(map(float, errors)))


def summary(rows: list[Row]) -> str:
    """Returns whether all rows are within their bounds, with those that are not, and the accepted
    ones.
    """
    return _summary(as_json(rows)["rows"])


def _summary(rows: Sequence[Recorded]) -> str:
    broken = [(row, complaint) for row in rows for complaint in row["complaints"]]
    parts = [f"All {len(rows)} rows are within their bounds."]
    if broken:
        count = len({id(row) for row, _ in broken})
        lines = [
            f"- {row['case']} ({row['inputs']}), {row['precision']}: {complaint}"
            for row, complaint in broken
        ]
        parts = [f"{count} of {len(rows)} rows miss a bound:", "\n".join(lines)]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["accepted"] and row["case"] not in reasons.setdefault(row["accepted"], []):
            reasons[row["accepted"]].append(row["case"])
    parts += [f"Accepted for {'; '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n\n".join(parts)


def accepted(row: Row) -> bool:
    """Returns whether ours is worse than a column that the case accepts to be worse than."""
    others = [row.ulps.get(column) for column in row.case.against] if row.case.accepted else []
    return any(
        value is not None and row.worst_of_ours > allowed(value, row.precision.wide)
        for value in others
    )


def as_json(rows: list[Row]) -> dict[str, Any]:
    """Returns all measurements. A column that raised is null, an infinite error the text "inf"."""
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
                "accepted": row.case.accepted if accepted(row) else "",
            }
            for row in rows
        ],
    }


def with_stored_torch(record: dict[str, Any], stored: Record) -> dict[str, Any]:
    """Returns a record without torch, with the stored figures of torch for the same rows."""
    before = {
        _key(row): {"torch": row["ulps"]["torch"]}
        for row in stored["rows"]
        if "torch" in row["ulps"]
    }
    rows = [{**row, "ulps": {**row["ulps"], **before.get(_key(row), {})}} for row in record["rows"]]
    where = stored["environment"]
    measured = where.get("torch_measured", f"{where['date']}, with Python {where['python']}")
    known = {"torch": where["torch"], "torch_measured": measured}
    return {"environment": record["environment"] | known, "rows": rows}


def _key(row: Recorded) -> tuple[str, str, str]:
    return row["case"], row["inputs"], row["precision"]


def dumped(record: Record) -> str:
    """Returns a record as JSON, with a row on each line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    where = json.dumps(record["environment"])
    return f'{{\n "environment": {where},\n "rows": [\n{rows}\n ]\n}}\n'

"""docs/benchmarks.md, made of the stored rows of the tables and of the notes that explain them.

python -m benchmarks --write         # measures the tables that need no GPU, stores their rows, and
                                     # writes the page
python -m benchmarks memory --write  # the same of another table: memory or accel
python -m benchmarks.page            # measures nothing: the page of the stored rows
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import measured_on, note, table, wrapped

HERE = Path(__file__).parent
NOTES, RESULTS, PAGE = HERE / "notes", HERE / "results", HERE.parent / "docs" / "benchmarks.md"
ACCEL = "accel"
NAMES = (
    *(ACCEL, "models", "layers", "autocast", "ports"),
    *("optimizer", "scale", "inspection", "memory"),
)  # in the order of the page
TITLES = {
    "models": "Models",
    "layers": "Layers",
    "autocast": "Autocast",
    "ports": "Tracing of ported models",
    "optimizer": "Optimizer steps",
    "scale": "Growth with layers",
    "inspection": "Audit and compare",
    "memory": "Estimated and measured memory",
    "sharded": "A whole sharded train step",
    "accumulators": "Gradients as accumulators",
}
QUANTITIES = {"temporary": "memory", "exchange": "communicated"}
# The quantities that the page shows; the stored rows have the others too.
SHOWN = {
    "models": ("saved", "c-bytes", "tracing"),
    "layers": ("saved", "c-bytes"),
    "autocast": ("saved", "error"),
    "optimizer": (),  # docs/performance.md has them
    "scale": ("saved", "calls"),
    f"{ACCEL} models": ("cycles", "bytes", "temporary"),
    f"{ACCEL} optimizer": (),
}  # docs/performance.md has the other quantities of models
RANGES = ("autocast", "inspection", "memory")  # tables that the page shows as ranges
EQUAL = 0.005  # a program whose ratios are all this close to 1 is left out
COMPARED = (
    "scale",
)  # of these tables the page shows the rows that compare with another program only
FEW = 3  # a target with fewer rows shares a table with the others of its kind
Row = Mapping[str, Any]
Stored = Mapping[str, Any]  # "environment" and "rows"


# --------------------------------------------------------------------------------------------------
# Stored rows
# --------------------------------------------------------------------------------------------------


def stored(folder: Path | None = None) -> dict[str, Stored]:
    """Returns the stored tables by name, in the order of the page."""
    files = {name: (folder or RESULTS) / f"{name}.json" for name in NAMES}
    return {n: json.loads(f.read_text("utf-8")) for n, f in files.items() if f.exists()}


def store(
    name: str,
    environment: Mapping[str, str],
    rows: Sequence[Row],
    folder: Path | None = None,
) -> None:
    """Stores the rows of a table. Rows of accelerators replace those of the same table and target;
    the others stay.

    Raises:
      ValueError: other rows would stay, and were made with another version of JAX.
    """
    file = (folder or RESULTS) / f"{name}.json"
    kept: list[Row] = []
    if name == ACCEL and file.exists():
        rows = [row for row in rows if row["table"] != "baseline"]
        before = json.loads(file.read_text("utf-8"))
        measured = {(row["table"], row["target"]) for row in rows}
        kept = [row for row in before["rows"] if (row["table"], row["target"]) not in measured]
        if kept and before["environment"]["jax"] != environment["jax"]:
            raise ValueError(
                f"The stored rows are of jax {before['environment']['jax']}, and these of jax "
                f"{environment['jax']}: measure all tables and targets, or install that version."
            )
    lines = ",\n".join(f"  {json.dumps(row)}" for row in [*kept, *rows])
    where = json.dumps(dict(environment))
    file.write_text(f'{{\n "environment": {where},\n "rows": [\n{lines}\n ]\n}}\n', "utf-8")


# --------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------


def markdown(tables: Mapping[str, Stored]) -> str:
    """Returns the page: the tables of accelerators, then those of XLA's programs for CPUs."""
    on_cpus = {name: one for name, one in tables.items() if name != ACCEL and _ratios(one)}
    parts = [note(NOTES, "benchmarks")]
    if ACCEL in tables:
        parts += accelerators(tables[ACCEL])
    if on_cpus:
        parts += [note(NOTES, "cpus"), _measured(on_cpus)]
    for name, one in on_cpus.items():
        parts += [
            f"### {TITLES.get(name, name)}",
            f"`python -m benchmarks --only {name}`",
            note(NOTES, name),
            *_shown_parts(name, one["rows"]),
        ]
    return wrapped("\n\n".join(part for part in parts if part)) + "\n"


def _shown_parts(name: str, rows: Sequence[Row]) -> list[str]:
    """Returns the tables of a command's rows; of some, the ranges of rows within their bounds."""
    shown = _shown(name, rows)
    if name not in RANGES:
        return _tables(shown, _ratio)
    within = [row for row in shown if not row["missed"]]
    quantities = dict.fromkeys(row["quantity"] for row in within)
    return [
        "\n".join(_range(quantity, within) for quantity in quantities),
        *_tables([row for row in shown if row["missed"]], _ratio),
    ]


def _range(quantity: str, rows: Sequence[Row]) -> str:
    """Returns a list item with the smallest and the largest ratio of a quantity."""
    ratios = sorted(row["ratio"] for row in rows if row["quantity"] == quantity)
    name = QUANTITIES.get(quantity, quantity)
    return f"- **{name}**: {ratios[0]:.2f} to {ratios[-1]:.2f}, of {len(ratios)} rows."


def _shown(name: str, rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a table that the page shows: those of its main quantities, and those that
    miss a bound.
    """
    return [
        row
        for row in rows
        if row["missed"]
        or (
            row["quantity"] in SHOWN.get(name, (row["quantity"],))
            and (name not in COMPARED or "beside" in row["name"])
        )
    ]


def _ratios(one: Stored) -> bool:
    """Returns whether a table has rows of ratios; others have pages of their own."""
    rows = one["rows"]
    return isinstance(rows, list) and bool(rows) and all("ratio" in row for row in rows)


def _measured(tables: Mapping[str, Stored]) -> str:
    """Returns where tables were measured, those of one environment together."""
    names: dict[str, list[str]] = {}
    for name, one in tables.items():
        names.setdefault(measured_on(one["environment"]), []).append(f"`{name}`")
    if len(names) == 1:
        return next(iter(names))
    return "\n".join(f"- {text} Tables: {', '.join(of)}." for text, of in names.items())


def accelerators(one: Stored) -> list[str]:
    """Returns the part of the page on TPUs and GPUs: a table for each of the command's tables and
    targets.
    """
    parts = [note(NOTES, "accelerators"), _compiled(one["environment"])]
    rows = [row for row in one["rows"] if row["table"] != "baseline"]
    for name in dict.fromkeys(row["table"] for row in rows):
        parts += [
            f"### {TITLES.get(name, name)}, compiled for accelerators",
            f"`python -m benchmarks.accel.{name}`",
            note(NOTES, f"{name}_on_accelerators"),
        ]
        of_table = _shown(f"{ACCEL} {name}", [row for row in rows if row["table"] == name])
        targets = {
            target: [row for row in of_table if row["target"] == target]
            for target in dict.fromkeys(row["target"] for row in of_table)
        }
        few = [target for target, of in targets.items() if len({row["name"] for row in of}) < FEW]
        for target, of_target in targets.items():
            if target not in few or len(targets) == 1:
                parts += [f"On {target}:", *_tables(of_target, _with_figures)]
                parts += [note(NOTES, f"{name}_on_{target.partition(':')[0]}")]
        if few and len(targets) > 1:
            others = [
                {**row, "name": f"{row['name']}, {target}"}
                for target in few
                for row in targets[target]
            ]
            which = "other targets" if len(few) < len(targets) else "each target"
            parts += [f"On {which}:", *_tables(others, _with_figures)]
    return parts


def _compiled(environment: Mapping[str, str]) -> str:
    return measured_on(environment).replace("Measured", "Compiled", 1)


def _tables(rows: Sequence[Row], cells: Callable[[Row], Mapping[str, str]]) -> list[str]:
    """Returns tables of rows: a line for each name, a column for each quantity. Names that share
    fewer than half of their quantities are in different tables.
    """
    names: dict[str, dict[str, str]] = {}
    for row in _unequal(_of_both_apis(rows)):
        names.setdefault(_program(row["name"]), {}).update(cells(row))
    return [
        table(
            ["ours / reference", *(QUANTITIES.get(name, name) for name in columns)],
            [[name, *(names[name].get(column, "") for column in columns)] for name in members],
        )
        for columns, members in _groups(names)
    ]


def _unequal(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the programs with a ratio that is not about 1, or with figures."""
    kept = {
        row["name"]
        for row in rows
        if row["missed"] or "ours" in row or abs(row["ratio"] - 1) >= EQUAL
    }
    return [row for row in rows if row["name"] in kept]


def _program(name: str) -> str:
    """Returns the name of a row's program, and of the one that it is compared with.

    >>> _program("MLP, beside jmp"), _program("linen beside plain optax")
    ('MLP / jmp', 'linen / plain optax')
    """
    return name.replace(", beside ", " / ").replace(" beside ", " / ")


def _of_both_apis(rows: Sequence[Row]) -> list[Row]:
    """Returns rows with one for the two APIs, of the larger ratio: "MLP" for "MLP, linen" and
    "MLP, nnx".
    """
    names = {row["name"] for row in rows}
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        model = row["name"].removesuffix(", linen").removesuffix(", nnx")
        both = {f"{model}, linen", f"{model}, nnx"} <= names
        key = (model if both else row["name"], row["quantity"])
        if key not in found or row["ratio"] > found[key]["ratio"]:
            found[key] = {**row, "name": key[0]}
    return list(found.values())


def _groups(names: Mapping[str, Iterable[str]]) -> list[tuple[list[str], list[str]]]:
    """Returns the columns and the names of each table, in the order of the first names."""
    order = list(dict.fromkeys(column for columns in names.values() for column in columns))
    found: dict[frozenset[str], list[str]] = {}
    for name, columns in names.items():
        found.setdefault(frozenset(columns), []).append(name)
    merged: dict[frozenset[str], list[str]] = {}
    for columns in sorted(found, key=len, reverse=True):
        wider = next((w for w in merged if columns < w and 2 * len(columns) >= len(w)), columns)
        merged.setdefault(wider, []).extend(found[columns])
    place = {name: i for i, name in enumerate(names)}
    groups = [
        ([column for column in order if column in columns], sorted(members, key=place.__getitem__))
        for columns, members in merged.items()
    ]
    return sorted(groups, key=lambda group: place[group[1][0]])


def _ratio(row: Row) -> dict[str, str]:
    """Returns the ratio, in bold with its bound where it misses it."""
    ratio = f"{row['ratio']:.3f}"
    bound = "" if row["bound"] is None else f" (bound {row['bound']:g})"
    return {row["quantity"]: f"**{ratio}**{bound}" if row["missed"] else ratio}


def _with_figures(row: Row) -> dict[str, str]:
    """Returns the ratio, and where they are stored the figures that it is of."""
    (ratio,) = _ratio(row).values()
    unknown = f", not counted: {row['unknown']}" if row.get("unknown") else ""
    if "ours" in row:
        ratio = f"{ratio} ({_short(row['ours'])} / {_short(row['reference'])}{unknown})"
    return {row["quantity"]: ratio}


def _short(number: float) -> str:
    """Returns three digits and a unit: 12.3M."""
    for unit, size in (
        ("T", 1e12),
        ("G", 1e9),
        ("M", 1e6),
        ("k", 1e3),
        ("", 1.0),
        ("m", 1e-3),
        ("u", 1e-6),
    ):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


if __name__ == "__main__":
    PAGE.write_text(markdown(stored()), encoding="utf-8")

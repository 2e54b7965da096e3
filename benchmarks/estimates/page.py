"""docs/estimates.md, made of the stored results."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimates.tables import MODELS, TARGETS, Table, stored, tables
from benchmarks.markdown import WIDTH, note, wrapped
from benchmarks.markdown import table as markdown

PAGE = Path(__file__).parents[2] / "docs" / "estimates.md"
NOTES = Path(__file__).parent / "notes"
GIB, MIB = 2.0**30, 2.0**20
_LINES = 4  # of the largest arrays
Found = Mapping[str, Any]
HEAD = ("policy", "memory, GiB", "left", "ms", "MiB exchanged")


def page() -> str:
    """Returns the page of all stored results."""
    found = {(table.model.module, table.target): stored(table) for table in tables()}
    parts = [note(NOTES, "opening"), made_by([one for one in found.values() if one is not None])]
    for model in MODELS:
        parts += [f"## {model.title}", note(NOTES, model.module)]
        for table in tables(only=[model.module]):
            if table.target == TARGETS[0]:
                parts += [f"```console\n{command(table.command)}\n```"]
            one = found[model.module, table.target]
            if one is not None:
                parts += [section(table, one)]
    parts += [note(NOTES, "arithmetic"), arithmetic(found)]
    return wrapped("\n\n".join(part for part in parts if part)) + "\n"


def made_by(found: Sequence[Found]) -> str:
    """Returns the sentences that say which compilers made the rows, where, and whose figures of the
    devices they use.
    """
    compilers = dict.fromkeys(one["compiler"] for one in found)
    sources = dict.fromkeys(one["source"] for one in found)
    return (
        f"Compiled on an x86 Linux machine with 2 cores, with {' and with '.join(compilers)}. "
        f"Figures of the devices: {'; '.join(sources)}."
    )


# --------------------------------------------------------------------------------------------------
# A table
# --------------------------------------------------------------------------------------------------


def section(table: Table, found: Found) -> str:
    """Returns a table, and the largest arrays of the first row beyond memory."""
    return "\n\n".join(
        [
            f"### {table.model.title}, {place(found)}",
            figures(found["rows"]),
            *itertools.islice(buffers(found["rows"]), 1),
            *remarks(found),
        ]
    )


def place(found: Found) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    return found["target"] + (f" ({axes})" if len(found["mesh"]) > 1 or "fsdp" in axes else "")


def command(words: Sequence[str]) -> str:
    """Returns a command as it is typed, wrapped with backslashes."""
    lines, line = [], "$"
    for flag, value in _pairs(words):
        part = " ".join(map(shlex.quote, (flag, *value)))
        if len(f"{line} {part} \\") > WIDTH:
            lines, line = [*lines, f"{line} \\"], "   "
        line = f"{line} {part}"
    return "\n".join([*lines, line])


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields each flag with its value."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        yield word, [rest.pop(0)] if word.startswith("-") and rest else []


def figures(rows: Sequence[Found]) -> str:
    """Returns the table of the rows, without columns that are empty in all of them."""
    lines = [cells(row) for row in rows]
    filled = [any(column) for column in zip(*lines, strict=True)]
    return markdown(
        list(itertools.compress(HEAD, filled)),
        [list(itertools.compress(line, filled)) for line in lines],
    )


def cells(row: Found) -> list[str]:
    """Returns a row of a table."""
    seconds = total_seconds(row)
    return [
        row["name"],
        gib(row["memory"]),
        left(row),
        "" if seconds is None else milliseconds(seconds),
        exchanged(row["collectives"]),
    ]


def left(row: Found) -> str:
    """Returns the GiB that a device has left; in bold, below 0, those that it lacks."""
    spare = (row["capacity"] - row["memory"]) / GIB
    fits = not row["is_exhausted"] and spare >= 0
    return f"{spare:.2f}" if fits else f"**{spare:.2f}**"


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def exchanged(collectives: Sequence[Found]) -> str:
    """Returns MiB by dtype, the largest first; below a MiB nothing."""
    sums: dict[str, float] = {}
    for one in collectives:
        sums[one["dtype"]] = sums.get(one["dtype"], 0.0) + one["bytes"]
    large = sorted(((size, dtype) for dtype, size in sums.items() if size > MIB), reverse=True)
    return ", ".join(f"{size / MIB:.0f} {dtype}" for size, dtype in large)


def exchange_seconds(row: Found) -> float | None:
    seconds = [one["seconds"] for one in row["collectives"]]
    return None if None in seconds else sum(seconds)


def total_seconds(row: Found) -> float | None:
    """Returns the seconds of kernels and exchanges, as `PolicyCost.sequential_seconds`."""
    if row["compute_seconds"] is None:
        return None
    return row["compute_seconds"] + (exchange_seconds(row) or 0.0)


def buffers(rows: Sequence[Found]) -> Iterator[str]:
    """Yields the largest arrays of each row that runs out of memory, alike ones in a line."""
    for row in rows:
        if row["is_exhausted"] and row["buffers"]:
            alike: dict[tuple[Any, ...], list[Found]] = {}
            for one in row["buffers"]:
                key = one["kind"], one["bytes"], one["dtype"], _owner(one), one["operation"]
                alike.setdefault(key, []).append(one)
            lines = [_line(group) for group in alike.values()][:_LINES]
            yield f"The largest arrays under {row['name']}:\n\n" + "\n".join(lines)


def _owner(one: Found) -> str:
    """Returns the tree of an argument, as in ``args[1].inner[0].mu``, or a temporary's path."""
    return one["path"].partition("['")[0] if one["kind"] == "argument" else one["path"]


def _line(alike: Sequence[Found]) -> str:
    first = alike[0]
    count = "" if len(alike) == 1 else f"{len(alike)} of "
    shapes = dict.fromkeys(f"{one['dtype']}[{','.join(map(str, one['shape']))}]" for one in alike)
    parts = (_owner(first), first["operation"], first["source"])
    where = ", ".join(f"`{part}`" for part in parts if part) or "unknown"
    kind = first["kind"] + ("s" if len(alike) > 1 else "")
    return f"- {count}{gib(first['bytes'])} GiB, {' and '.join(shapes)}: {kind} {where}"


def remarks(found: Found) -> Iterator[str]:
    """Yields the notes on a table, and the costs that its figures leave out."""
    yield from found["notes"]
    left_out = dict.fromkeys(itertools.chain(*(row["uncounted"] for row in found["rows"])))
    if left_out:
        yield f"Not counted: {', '.join(left_out)}."


# --------------------------------------------------------------------------------------------------
# Beside arithmetic
# --------------------------------------------------------------------------------------------------


def arithmetic(found: Mapping[tuple[str, str], Found | None]) -> str:
    """Returns the range of memory and FLOPs beside arithmetic, of each table's first row."""
    beside = [_beside(one, one["rows"][0]) for one in found.values() if one is not None]
    arguments, flops = (f"{min(of):.3f} to {max(of):.3f}" for of in zip(*beside, strict=True))
    return f"Arguments are {arguments} of those by hand, and FLOPs {flops}."


def _beside(found: Found, row: Found) -> tuple[float, float]:
    counts, devices = found["counts"], found["devices"]
    by_hand = 12.0 * counts["params"] / found["mesh"].get("fsdp", 1) + counts["batch"]
    flops = sum(row["matmul_flops"].values())
    return row["arguments"] / by_hand, flops / (counts["flops"] * devices)

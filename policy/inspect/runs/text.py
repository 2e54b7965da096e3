"""A run as text: its advice, and the rows that lose most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policy.inspect.render.table import Column, Table
from policy.inspect.render.text import OUTSIDE, Paint, printable, short, wrapped
from policy.inspect.runs.advice import Advice, RunRecord, advise
from policy.programs.paths import folded

_ROWS = 12  # of the table
_SHOWN = 1e-3  # the least share that is shown


def run_text(records: Sequence[RunRecord], name: str, *, color: bool = False) -> str:
    """Returns a run as text: a summary, its advice, and the rows that lose most.

    Args:
      records: of the run, in the order of their steps.
      name: of the log.
      color: marks words by escape codes of terminals.
    """
    paint, advice = Paint(color), advise(records)
    lines = [paint("bold", printable(f"{name}: {summary(records, advice)}"))]
    alike: dict[tuple[str, int, str], list[Advice]] = {}
    for one in advice:
        alike.setdefault((one.kind, one.step, one.line), []).append(one)
    for each in alike.values():
        lines += ["", f"{paint('bad', each[0].kind)}  {printable(_place(each[0]))}"]
        lines += wrapped(each[0].message, " " * 4, 4)
        if others := folded(one.path for one in each[1:]):
            lines += wrapped(f"also: {', '.join(others)}", " " * 4, 6)
    return "\n".join([*lines, *_table(records[-1]["rows"] if records else (), color)])


def summary(records: Sequence[RunRecord], advice: Sequence[Advice]) -> str:
    """Returns a run in a line: its steps, skipped ones, loss scale, and how much advice there is.

    >>> record = {"step": 3, "skipped": True, "loss_scale": 2.0}
    >>> summary([record], ())
    '1 record of step 3, 1 skipped, loss scale 2, no advice'
    """
    if not records:
        return "no records"
    low, high = records[0]["step"], records[-1]["step"]
    count = f"{len(records)} record{'s' if len(records) > 1 else ''}"
    steps = f"step {low}" if low == high else f"steps {low} to {high}"
    parts = [f"{count} of {steps}"]
    if skipped := sum(bool(record["skipped"]) for record in records):
        parts.append(f"{skipped} skipped")
    if (scale := records[-1]["loss_scale"]) is not None:
        parts.append(f"loss scale {float(scale):g}")
    kinds = len(dict.fromkeys(one.kind for one in advice))
    parts.append(f"advice of {kinds} kind{'s' if kinds > 1 else ''}" if kinds else "no advice")
    return ", ".join(parts)


def _place(one: Advice) -> str:
    """Returns the module, layers, steps and line of advice."""
    parts = [one.path or OUTSIDE]
    if one.layers:
        numbers = ", ".join(folded(str(layer) for layer in one.layers))
        parts.append(f"layer{'s' if len(one.layers) > 1 else ''} {numbers}")
    until = f" to {one.until}" if one.until != one.step else ""
    return ", ".join(filter(None, (*parts, f"step {one.step}{until}", one.line)))


def _table(rows: Sequence[Mapping[str, Any]], color: bool) -> Iterator[str]:
    """Yields the table of those rows of a record that lose most."""
    losing = sorted((row for row in rows if _lost(row) >= _SHOWN), key=_lost, reverse=True)
    if not losing:
        return
    shown = losing[:_ROWS]
    columns = [
        Column("", [f"{row['kind']} {short(row['dtype'])}" for row in shown], side="<"),
        Column("share lost", list(map(_lost, shown)), "{:.2%}".format),
        Column(
            "largest",
            [max(map(float, _each(row["numbers"]["largest"]))) for row in shown],
            "{:.3g}".format,
        ),
    ]
    table = Table("last record", [row["path"] or OUTSIDE for row in shown], columns, longest=48)
    yield from ("", table.text(color=color))
    if len(losing) > _ROWS:
        yield f"  and {len(losing) - _ROWS} rows more"


def _lost(row: Mapping[str, Any]) -> float:
    """Returns the share of numbers that a row's dtype doesn't hold, or of updates that vanish."""
    names = ("nan", "inf", "lost") if row["kind"] == "update" else ("below", "above", "nan", "inf")
    found = [_each(row["numbers"].get(name, 0.0)) for name in names]
    return min(sum(sum(map(float, each)) / len(each) for each in found), 1.0)


def _each(numbers: Any) -> list[Any]:
    return numbers if isinstance(numbers, list) else [numbers]

"""A run as text: its advice, and the rows that lose most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policy.inspect.render.text import OUTSIDE, Paint, short
from policy.inspect.runs.advice import Advice, RunRecord, advise
from policy.programs.paths import folded

_WIDTH = 100
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
    lines = [paint("bold", _printable(f"{name}: {summary(records, advice)}"))]
    alike: dict[tuple[str, int, str], list[Advice]] = {}
    for one in advice:
        alike.setdefault((one.kind, one.step, one.line), []).append(one)
    for each in alike.values():
        first, *rest = map(_printable, _of_kind(each))
        lines += ["", paint("bad", each[0].kind) + first, *rest]
    lines += ["", *map(_printable, _table(records))]
    return "\n".join(line.rstrip() for line in lines).rstrip()


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


def _printable(text: str) -> str:
    """Returns a text without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _of_kind(advice: Sequence[Advice]) -> Iterator[str]:
    """Yields the lines of advice on several modules alike, the first one without the kind."""
    one = advice[0]
    parts = [one.path or OUTSIDE]
    if one.layers:
        numbers = ", ".join(folded(str(layer) for layer in one.layers))
        parts.append(f"layer{'s' if len(one.layers) > 1 else ''} {numbers}")
    until = f" to {one.until}" if one.until != one.step else ""
    yield "  " + ", ".join(filter(None, (*parts, f"step {one.step}{until}", one.line)))
    yield from textwrap.wrap(one.message, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    if others := folded(other.path for other in advice[1:]):
        more = f"also: {', '.join(others)}"
        yield from textwrap.wrap(
            more, _WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False
        )


def _table(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields the rows of the last record that lose most."""
    rows = [(_lost(row), row) for row in (records[-1]["rows"] if records else ())]
    rows = sorted((one for one in rows if one[0] >= _SHOWN), key=lambda one: -one[0])
    if not rows:
        return
    width = max(len(row["path"] or OUTSIDE) for _, row in rows[:_ROWS])
    yield f"{'last record':{width}}  {'':20}{'share lost':>10}{'largest':>11}"
    for share, row in rows[:_ROWS]:
        what = f"{row['kind']} {short(row['dtype'])}"
        largest = max(map(float, _each(row["numbers"]["largest"])))
        yield f"{row['path'] or OUTSIDE:{width}}  {what:20}{share:>10.2%}{largest:>11.3g}"
    if len(rows) > _ROWS:
        yield f"and {len(rows) - _ROWS} rows more"


def _lost(row: Mapping[str, Any]) -> float:
    """Returns the share of numbers that a row's dtype doesn't hold, or of updates that vanish."""
    names = ("nan", "inf", "lost") if row["kind"] == "update" else ("below", "above", "nan", "inf")
    found = [_each(row["numbers"].get(name, 0.0)) for name in names]
    return min(sum(sum(map(float, each)) / len(each) for each in found), 1.0)


def _each(numbers: Any) -> list[Any]:
    return numbers if isinstance(numbers, list) else [numbers]

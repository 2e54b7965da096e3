"""A run as text: its advice, and the rows that lose most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from policy.inspect.render.html import OUTSIDE
from policy.inspect.render.text import Paint, short
from policy.inspect.runs.advice import Advice, advise
from policy.inspect.runs.history import RunRecord, Series, series_of
from policy.programs.paths import folded

_WIDTH = 100
_ROWS = 12  # of the table
_SHOWN = 1e-3  # the least share, on average, that is shown
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 24  # of a row's history


def run_text(records: Sequence[RunRecord], name: str, *, colour: bool = False) -> str:
    """Returns a run as text: a summary, its advice, and the rows that lose most.

    Args:
      records: of the run, in the order of their steps.
      name: of the log.
      colour: marks words by escape codes of terminals.
    """
    paint = Paint(colour)
    advice = advise(records)
    lines = [paint("bold", f"{name}: {summary(records, advice)}")]
    for kind in dict.fromkeys(one.kind for one in advice):
        lines += ["", *_of_kind([one for one in advice if one.kind == kind], paint)]
    lines += ["", *_table(records)]
    return "\n".join(line.rstrip() for line in lines).rstrip()


def summary(records: Sequence[RunRecord], advice: Sequence[Advice]) -> str:
    """Returns a run in a line: its steps, skipped ones, loss scale, and how much advice there is.

    >>> record = {"step": 3, "skipped": True, "loss_scale": 2.0, "first": None, "rows": []}
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


def advice_by_message(advice: Sequence[Advice]) -> list[list[Advice]]:
    """Returns advice of repeated modules together: that of one kind, first step and line."""
    found: dict[tuple[str, int, str], list[Advice]] = {}
    for one in advice:
        found.setdefault((one.kind, one.step, one.line), []).append(one)
    return [*found.values()]


def place_of(advice: Advice) -> str:
    """Returns where and when in words: ``decoder/mlp, layer 3, step 120 to 300``."""
    parts = [advice.path or OUTSIDE]
    if advice.layers:
        numbers = ", ".join(folded(str(layer) for layer in advice.layers))
        parts.append(f"layer{'s' if len(advice.layers) > 1 else ''} {numbers}")
    until = f" to {advice.until}" if advice.until != advice.step else ""
    return ", ".join((*parts, f"step {advice.step}{until}"))


def _of_kind(advice: Sequence[Advice], paint: Paint) -> Iterator[str]:
    for alike in advice_by_message(advice):
        one = alike[0]
        line = f", {one.line}" if one.line else ""
        yield f"{paint('bad', one.kind)}  {place_of(one)}{line}"
        yield from textwrap.wrap(
            one.message, _WIDTH, initial_indent="    ", subsequent_indent="    "
        )
        if others := folded(other.path for other in alike[1:]):
            more = f"also: {', '.join(others)}"
            yield from textwrap.wrap(
                more, _WIDTH, initial_indent="    ", subsequent_indent="      ",
                break_on_hyphens=False,
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def _table(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields the rows that lose most, with the history of the share lost."""
    rows = [row for row in series_of(records).values() if row.lost.mean() >= _SHOWN]
    rows.sort(key=lambda row: -float(np.mean(row.lost)))
    if not rows:
        return
    labels = [row_name(row) for row in rows[:_ROWS]]
    width = max(map(len, labels))
    head = f"{'share lost':{width + 21}}{'by step':{_COLUMNS + 2}}"
    yield f"{head}{'last':>8}{'largest':>11}"
    for label, row in zip(labels, rows, strict=False):
        drawn = sparkline(row.lost)
        figures = f"{row.lost[-1]:>8.2%}{row['largest'][-1]:>11.3g}"
        what = f"{row.kind} {short(row.dtype)}"
        yield f"{label:{width}}  {what:19}{drawn:{_COLUMNS + 2}}{figures}"
    if len(rows) > _ROWS:
        yield f"and {len(rows) - _ROWS} rows more"


def row_name(row: Series) -> str:
    """Returns the path of a row, with its layer: ``decoder/mlp[3]``."""
    return (row.path or OUTSIDE) + ("" if row.layer is None else f"[{row.layer}]")


def sparkline(shares: np.ndarray, columns: int = _COLUMNS) -> str:
    """Returns shares as a line of bars, each the largest of its steps.

    >>> sparkline(np.array([0, 0.01, 0.5, 1]))
    ' ▁▄█'
    """
    parts = np.array_split(shares, min(columns, len(shares)))
    heights = [int(np.ceil(float(part.max()) * (len(_BLOCKS) - 1))) for part in parts]
    return "".join(_BLOCKS[height] for height in heights)

"""Draws a run as one self-contained HTML page: time by module, colour by the share lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policy.inspect.render.html import (
    Cell,
    Columns,
    Markup,
    chip,
    figure,
    html_document,
    join_markup,
    resource,
    search_box,
    section,
    table,
    tag,
)
from policy.inspect.runs.advice import ADVICE_KINDS, Advice, advise
from policy.inspect.runs.history import RunRecord, Series, series_of
from policy.inspect.runs.text import advice_by_message, place_of, row_name, summary

_COLUMNS = 120  # the most columns of a map; each is the worst of its steps
_CELL, _ROW, _LABEL = 8, 14, 330  # pixels
_SHARES = (0.0, 1e-3, 1e-2, 0.1, 0.5)  # a class of colour above each
_KINDS = {
    "activation": "Activations: the share below and above the range of their dtype",
    "cotangent": "Gradients through modules: the share below and above the range of their dtype",
    "gradient": "Gradients of params: the share below and above the range of their dtype",
    "update": "Updates of params: the share that rounds away",
    "param": "Params: the share below and above the range of their dtype",
    "codes": "8-bit codes: the share at the limit, or 0",
    "input": "Inputs: the share below and above the range of their dtype",
}
_SHOWN = "zeros below above below_float16 above_float16 below_float8_e4m3fn above_float8_e4m3fn"


def run_page(records: Sequence[RunRecord], name: str) -> str:
    """Returns the page of a run: advice, a map of each kind of rows, and the last record's numbers.

    It contains its own style and scripts and fetches nothing; names from the program are escaped.

    Args:
      records: of the run, in the order of their steps.
      name: of the log.
    """
    advice = advise(records)
    header = [
        tag("h1", name),
        tag("p", summary(records, advice), class_="summary"),
        search_box("path, kind, dtype …"),
    ]
    style = resource("policy.inspect.runs", "run.css")
    return html_document(f"Run {name}", header, _sections(records, advice), style)


def _sections(records: Sequence[RunRecord], advice: Sequence[Advice]) -> Iterator[Markup]:
    parts = [*_advice(advice)] or [tag("p", "None.", class_="clean")]
    yield section("findings", f"Advice ({len(advice_by_message(advice))})", *parts)
    if not records:
        return
    rows = [*series_of(records).values()]
    steps = np.array([record["step"] for record in records])
    yield section("steps", "Steps", *_legend(), _scale_map(records, steps))
    for kind, title in _KINDS.items():
        if of_kind := [row for row in rows if row.kind == kind]:
            yield section(kind, title, _map(of_kind, steps))
    last = [row for row in rows if steps[-1] in row.steps]
    shown = table(_columns(), last)
    yield section("operations", f"Numbers of step {steps[-1]}", shown)


def _advice(advice: Sequence[Advice]) -> Iterator[Markup]:
    for kind in dict.fromkeys(one.kind for one in advice):
        groups = advice_by_message([one for one in advice if one.kind == kind])
        items = []
        for alike in groups:
            places = [tag("li", tag("span", place_of(one), class_="path")) for one in alike]
            line = tag("span", alike[0].line, class_="source")
            parts = (tag("div", alike[0].message), line, tag("ul", *places, class_="places"))
            items.append(tag("li", *parts, class_="finding"))
        meaning = tag("p", ADVICE_KINDS[kind], class_="meaning")
        title = tag("summary", tag("strong", kind), f" ({len(groups)})")
        yield tag("details", title, meaning, tag("ul", *items), class_="kind", open=True)


# --------------------------------------------------------------------------------------------------
# Maps
# --------------------------------------------------------------------------------------------------


def _legend() -> Iterator[Markup]:
    bounds = [*(f"{share:.1%}" for share in _SHARES[1:]), "100%"]
    marks = []
    for place, bound in enumerate(bounds):
        x = 150 * place
        square = _square(x, 0, 1, "lost", _opacity(place), f"up to {bound}")
        marks += [square, tag("text", f"up to {bound}", x=x + 14, y=11)]
    x = 150 * len(bounds)
    marks += [_square(x, 0, 1, "bad", 1, ""), tag("text", "NaN or infinite", x=x + 14, y=11)]
    yield tag("div", _svg(marks, x + 150, _ROW), class_="map")


def _scale_map(records: Sequence[RunRecord], steps: np.ndarray) -> Markup:
    """Draws the loss scale as bars of its logarithm, and the skipped steps."""
    scales = [float(one["loss_scale"]) if one["loss_scale"] is not None else 1 for one in records]
    heights = np.log2(np.clip(scales, 1, 2.0**32)) / 32 * 40
    marks = []
    for place, part in enumerate(_parts(len(steps))):
        x, height = _LABEL + place * _CELL, float(heights[part].min())
        told = f"step {_span(steps[part])}: loss scale {min(scales[i] for i in part):g}"
        marks.append(_rect(x, 40 - height, _CELL, height, "scale", 1, told))
        if any(records[i]["skipped"] or records[i]["first"] for i in part):
            marks.append(_rect(x, 42, _CELL, 6, "skipped", 1, f"{told}, skipped or not finite"))
    marks.append(tag("text", "loss scale, log2 from 0 to 32", x=0, y=30))
    marks.append(tag("text", "skipped, or not finite", x=0, y=50))
    return tag("div", _svg(marks, _width(len(steps)), 56), class_="map")


def _map(rows: Sequence[Series], steps: np.ndarray) -> Markup:
    marks: list[Markup] = []
    parts = _parts(len(steps))
    place_of_step = {int(step): place for place, part in enumerate(parts) for step in steps[part]}
    for number, row in enumerate(rows):
        y = number * _ROW
        label = row_name(row)
        title = tag("title", f"{label}, {row.dtype}, {row.line}")
        short = label if len(label) < 50 else f"…{label[-49:]}"
        marks.append(tag("text", title, short, x=0, y=y + 11))
        marks.append(_rect(_LABEL, y, len(parts) * _CELL, _ROW - 1, "ground", 1, ""))
        places = np.array([place_of_step[int(step)] for step in row.steps])
        marks += _cells(row, places, y, [steps[part] for part in parts])
    return tag("div", _svg(marks, _width(len(steps)), len(rows) * _ROW), class_="map")


def _cells(
    row: Series, places: np.ndarray, y: int, spans: Sequence[np.ndarray]
) -> Iterator[Markup]:
    """Yields a row's squares that are not empty; neighbours of one colour as one."""
    found: list[tuple[int, int, str, int, float]] = []  # place, count, class, level, share
    for place in np.unique(places):
        at = places == place
        bad, lost = float(row.not_finite[at].max()), float(row.lost[at].max())
        level = sum(lost > share for share in _SHARES)
        if not level and not bad:
            continue
        kind, share = ("bad", bad) if bad else ("lost", lost)
        if found and found[-1][2:4] == (kind, level) and sum(found[-1][:2]) == place:
            start, count, *_, worst = found.pop()
            found.append((start, count + 1, kind, level, max(worst, share)))
        else:
            found.append((int(place), 1, kind, level, share))
    for start, count, kind, level, share in found:
        span = _span(np.concatenate(spans[start : start + count]))
        what = "NaN or infinite" if kind == "bad" else "lost"
        told = f"{row_name(row)}, step {span}: {share:.2%} {what}"
        opacity = 1 if kind == "bad" else _opacity(level - 1)
        yield _square(_LABEL + start * _CELL, y, count, kind, opacity, told)


def _parts(count: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), min(count, _COLUMNS))


def _span(steps: np.ndarray) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _opacity(level: int) -> float:
    return (0.2, 0.4, 0.6, 0.8, 1.0)[level]


def _width(steps: int) -> int:
    return _LABEL + min(steps, _COLUMNS) * _CELL


def _svg(marks: Sequence[Markup], width: int, height: int) -> Markup:
    return tag("svg", *marks, width=width, height=height, role="img")


def _square(x: int, y: int, count: int, kind: str, opacity: float, told: str) -> Markup:
    return _rect(x, y, count * _CELL, _ROW - 1, kind, opacity, told)


def _rect(
    x: float, y: float, width: float, height: float, kind: str, opacity: float, told: str
) -> Markup:
    place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    shown = None if opacity == 1 else opacity
    return tag("rect", tag("title", told) if told else "", class_=kind, opacity=shown, **place)


# --------------------------------------------------------------------------------------------------
# Numbers of the last record
# --------------------------------------------------------------------------------------------------


def _columns() -> Columns:
    def number(row: Series, value: float, form: str) -> Cell:
        return ("", 0.0) if np.isnan(value) else (figure(value, form), value)

    def range_of(row: Series) -> float:
        largest, smallest = row["largest"][-1], row["smallest"][-1]
        return float(np.log2(largest / smallest)) if largest > 0 and smallest > 0 else np.nan

    columns: Columns = {
        "path": lambda row: (tag("span", row_name(row), class_="path"), None),
        "kind": lambda row: (row.kind, None),
        "dtype": lambda row: (chip(row.dtype), None),
        "largest": lambda row: number(row, row["largest"][-1], ".3g"),
        "rms": lambda row: number(row, float(np.sqrt(row["mean_square"][-1])), ".3g"),
        "range, log2": lambda row: number(row, range_of(row), ".1f"),
        "updates lost": lambda row: number(row, row["lost"][-1], ".2%"),
        "NaN, inf": lambda row: number(row, row.not_finite[-1], ".2%"),
    }
    for name in _SHOWN.split():
        columns[name.replace("_", " ")] = lambda row, name=name: number(row, row[name][-1], ".2%")
    columns["line"] = lambda row: (join_markup((tag("span", row.line, class_="source"),)), None)
    return columns

"""Advice on steps that are not finite: their first line, their batch or device, the loss scale."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from policy.inspect.runs import advice_kinds as kinds
from policy.inspect.runs.advice_kinds import Advice, rule, share
from policy.inspect.runs.history import RunRecord
from policy.programs.primitives import DIVIDES


def not_finite(records: Sequence[RunRecord]) -> Iterator[Advice]:
    """Yields advice for each line that first is not finite, at its first step.

    A gradient that overflows under a loss scale, and is skipped, is the scale's own search: that is
    `skips`'. Params that are not finite after a step that was not are its consequence.
    """
    bad = [one for one in records if one["first"] is not None and not _is_search(one)]
    origins: dict[tuple[Any, ...], list[RunRecord]] = {}
    for place, record in enumerate(bad):
        first = record["first"]
        entered = first["entered"]
        is_param = entered is not None and entered in _params_of(record)
        if is_param and place:
            continue
        what = entered if entered is not None else (first["operation"], first["line"])
        origins.setdefault((what, first["path"], first["direction"], is_param), []).append(record)
    yield from _of_one_device(bad)
    for (_, path, _, is_param), alike in origins.items():
        first = alike[0]["first"]
        kind, said = _cause(first, is_param, _dtype_of(alike[0]))
        steps = alike[0]["step"], alike[-1]["step"]
        times = f" In {len(alike)} steps until {steps[1]}." if len(alike) > 1 else ""
        layers = () if first["layer"] is None else (first["layer"],)
        message = f"{said[0]}{_where(first)}.{times} {said[1]}"
        yield Advice(kind, path, *steps, message, first["line"] or "", layers)


def _cause(first: dict[str, Any], is_param: bool, dtype: str) -> tuple[str, tuple[str, str]]:
    """Returns the kind, the fault and the remedy."""
    path, operation, entered = first["path"], first["operation"], first["entered"]
    if is_param:
        said = f"{entered} is not finite before this step", "Look at the checkpoint, or at `init`."
        return kinds.PARAMS, said
    if entered is not None:
        remedy = "Look at this batch: its data are not finite before the model runs."
        return kinds.BATCH, (f"The input {entered} is not finite", remedy)
    what = f"{operation} ({first['direction']}) is not finite"
    keep = rule(path)
    if operation in DIVIDES:
        remedy = f"Its operand is 0 or was rounded to 0: an epsilon below {_tiny(dtype)} is 0. Take"
        if first["direction"] == "update":
            keep = "Or run the optimizer in float32: policy.mixed_precision(tx, ...)"
        return kinds.DIVISION, (what, f"{remedy} a larger one. {keep}.")
    if dtype == "float16":
        wide = "Sum in float32, as policy.reductions do. " if "reduce" in operation else ""
        what = f"{what}: it exceeds 65504"
        if first["direction"] == "backward":
            remedy = 'Take mixed_precision(..., loss_scale="dynamic"), which lowers a scale that is'
            return kinds.OVERFLOW, (what, f"{remedy} too large. {keep}.")
        return kinds.OVERFLOW, (what, f"{wide}{keep}; or take mixed_bfloat16.")
    if first["direction"] == "update":
        remedy = "Gradients were finite: run the optimizer in policy.mixed_precision(...), and clip"
        return kinds.NOT_FINITE, (what, f"{remedy} with clip_global_norm=.")
    remedy = "If it is NaN in float32 too, lower the learning rate, or clip_global_norm=1.0"
    wide = f" {keep}." if dtype not in ("float32", "float64") else ""
    return kinds.NOT_FINITE, (what, f"{remedy}.{wide}")


def _dtype_of(record: RunRecord) -> str:
    """Returns the dtype of the first result that is not finite, or else of its module's values."""
    first = record["first"]
    kind = "cotangent" if first["direction"] == "backward" else "activation"
    rows = [row for row in record["rows"] if row["kind"] in (kind, "activation")]
    of_module = [row["dtype"] for row in rows if row["path"] == first["path"]]
    return first.get("dtype") or next(iter([*of_module, *(row["dtype"] for row in rows)]), "")


def _tiny(dtype: str) -> str:
    return {"float16": "6e-8 in float16", "bfloat16": "1e-38"}.get(dtype, "its dtype's range")


def _where(first: dict[str, Any]) -> str:
    parts = []
    if first["examples"]:
        low, high = first["examples"]
        parts.append(f" in example {low}" if low == high else f" in examples {low} to {high}")
    if first["devices"]:
        named = ", ".join(map(str, first["devices"]))
        parts.append(f" on device{'s' if len(first['devices']) > 1 else ''} {named}")
    return "".join(parts)


def _params_of(record: RunRecord) -> set[str]:
    return {row["path"] for row in record["rows"] if row["kind"] == "param"}


def _is_search(record: RunRecord) -> bool:
    """Returns whether a dynamic loss scale handles it: gradients overflow, the step is skipped."""
    is_backward = record["first"]["direction"] == "backward" and not record["first"]["entered"]
    return bool(is_backward and record["skipped"] and (record["loss_scale"] or 1.0) != 1.0)


def _of_one_device(bad: Sequence[RunRecord]) -> Iterator[Advice]:
    named: list[tuple[int, ...]] = [tuple(one["first"]["devices"] or ()) for one in bad]
    if len(bad) < 2 or len(set(named)) > 1 or len(named[0]) != 1:
        return
    first, (device,) = bad[0]["first"], named[0]
    message = (
        f"Device {device} alone is not finite, in {len(bad)} steps: {first['operation']} "
        f"({first['direction']}). Look at the data that it gets, and at the device: the others run "
        "the same program."
    )
    steps = bad[0]["step"], bad[-1]["step"]
    yield Advice(kinds.DEVICE, first["path"], *steps, message, first["line"] or "")


# --------------------------------------------------------------------------------------------------
# The loss scale
# --------------------------------------------------------------------------------------------------


def skips(records: Sequence[RunRecord]) -> Iterator[Advice]:
    """Yields advice on the loss scale and on skipped steps."""
    scaled = [record for record in records if record["loss_scale"] is not None]
    missed = [one for one in scaled if one["skipped"] and _direction(one) != "forward"]
    low = [one for one in scaled if float(one["loss_scale"]) < 1]
    if low:
        scale = min(float(one["loss_scale"]) for one in low)
        said = f"The loss scale fell to {scale:.3g}. Below 1 it loses gradients, and hides a cause"
        remedy = 'that no scale mends. Take loss_scale="dynamic", whose minimum is 1.'
        yield _on_scale(low, f"{said} {remedy}")
    at_floor = [one for one in missed if float(one["loss_scale"]) == 1]
    if len(at_floor) >= kinds.LEAST:
        said = f"The loss scale is at its minimum of 1, and {len(at_floor)} steps still overflow"
        yield _on_scale(at_floor, f"{said}. {rule(_path(at_floor))}, or clip its inputs.")
    yield from _stays(missed)
    yield from _many(scaled)


def _stays(missed: Sequence[RunRecord]) -> Iterator[Advice]:
    by_scale: dict[float, list[RunRecord]] = {}
    for record in missed:
        by_scale.setdefault(float(record["loss_scale"]), []).append(record)
    for scale, alike in by_scale.items():
        if scale > 1 and len(alike) >= kinds.SAME_SCALE and len(by_scale) == 1:
            said = f"Gradients overflow at the loss scale {scale:g} in {len(alike)} steps"
            remedy = 'The scale stays: take loss_scale="dynamic", which halves it.'
            yield _on_scale(alike, f"{said}. {remedy}")


def _many(scaled: Sequence[RunRecord]) -> Iterator[Advice]:
    if not scaled:
        return
    start, end = scaled[0]["step"] + kinds.SETTLED, scaled[-1]["step"]
    missed = [one for one in scaled if one["skipped"] and one["step"] >= start]
    if len(missed) >= kinds.BEFORE and len(missed) > kinds.SKIPPED * (end - start + 1):
        part = share(len(missed) / (end - start + 1))
        said = f"{len(missed)} steps are skipped, {part} of those after step {start}"
        remedy = f"A dynamic scale skips one in 2000. {rule(_path(missed))}, or take mixed_bfloat16"
        yield _on_scale(missed, f"{said}. {remedy}.", kinds.SKIPS)


def _on_scale(alike: Sequence[RunRecord], message: str, kind: str = kinds.SCALE) -> Advice:
    where = next((one["first"]["line"] for one in alike if one["first"]), "")
    return Advice(kind, _path(alike), alike[0]["step"], alike[-1]["step"], message, where or "")


def _direction(record: RunRecord) -> str:
    return record["first"]["direction"] if record["first"] else ""


def _path(records: Sequence[RunRecord]) -> str:
    """Returns the module that is most often the first that is not finite."""
    paths = collections.Counter(one["first"]["path"] for one in records if one["first"])
    return paths.most_common(1)[0][0] if paths else ""

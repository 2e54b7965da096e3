"""Advice about a run: its faults, with their places and first steps, as the records prove them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from policy.inspect.monitor.snapshot import first_of, identity_of
from policy.programs.primitives import DIVIDES, POWERS

RunRecord = dict[str, Any]

OVERFLOW = "overflow"
DIVISION = "division-by-zero"
NOT_FINITE = "not-finite"
INPUT = "input-not-finite"
STATE = "state-not-finite"
SCALE = "loss-scale"
VANISHED = "vanished-updates"
NO_UPDATE = "no-updates"
UNDERFLOW = "underflow"

LEAST = 3  # records in a row, for what one record does not show
HALF = 0.5  # the share that is too much of updates and gradients
SAME_SCALE = 4  # skipped steps at one loss scale
IDLE = 10  # records in a row without a change of params

ADVICE_KINDS = {
    OVERFLOW: "A result exceeds the largest number of its dtype, and its operands are finite.",
    DIVISION: "A division, root or logarithm of finite numbers is infinite or NaN.",
    NOT_FINITE: "Another result or output of a step is infinite or NaN.",
    INPUT: "An argument of a step that is not finite is not finite, and was in all finite steps.",
    STATE: "Params or state are not finite before a step, and no recorded step made them so.",
    SCALE: "The loss scale is below 1, or at 1 and gradients still overflow in "
    f"{LEAST} or more steps; or {SAME_SCALE} or more overflow at one scale, that stays.",
    VANISHED: f"{HALF:.0%} or more of a param's updates round away, in {LEAST} or more records in "
    "a row; params in 16 bits or fewer.",
    NO_UPDATE: f"No param changes in {IDLE} or more records in a row; updates are 0, gradients "
    "are not.",
    UNDERFLOW: f"{HALF:.0%} or more of the non-zero float16 gradients or updates are subnormal, in "
    f"{LEAST} or more records in a row.",
}

_DIVISIONS = {
    ("log", "inf"): "an operand is 0",
    ("log", "nan"): "an operand is negative",
    ("log1p", "inf"): "an operand is -1",
    ("log1p", "nan"): "an operand is below -1",
    ("rsqrt", "inf"): "an operand is 0",
    ("rsqrt", "nan"): "an operand is negative",
    ("sqrt", "nan"): "an operand is negative",
    ("div", "nan"): "both operands are 0",
    ("div", "inf"): "the divisor is 0, or the quotient exceeds the dtype",
}
_OTHER = DIVIDES - POWERS - {name for name, _ in _DIVISIONS}  # divide by 0, or overflow


@dataclasses.dataclass(frozen=True)
class Advice:
    """A fault of a run, and the remedy where there is one.

    >>> from policy.inspect.runs.advice import advise
    >>> nothing = {"first": None, "outputs": [], "entered": [], "made": [], "rows": []}
    >>> record = {"step": 7, "skipped": True, "loss_scale": 0.5, **nothing}
    >>> [(one.kind, one.step) for one in advise([record])]
    [('loss-scale', 7)]

    Attributes:
      kind: one of `policy.inspect.runs.advice.ADVICE_KINDS`.
      path: of the module, or of the array for params and their updates; "" outside of any.
      step, until: the first and last step that show it.
      message: the fault and the remedy, in a sentence or two each.
      line: the line of the user's code, or "".
      layers: the steps of a scan over layers, where it happens in one.
    """

    kind: str
    path: str
    step: int
    until: int
    message: str
    line: str = ""
    layers: tuple[int, ...] = ()


def advise(records: Sequence[RunRecord]) -> tuple[Advice, ...]:
    """Returns the faults of a run, the gravest kind first, and in a kind the earliest.

    Args:
      records: of a run, in the order of their steps, as `RunLog.records` returns them.
    """
    finite = [one for one in records if not one["outputs"] and not one["skipped"]]
    found = [*_not_finite(records), *_scale(records), *_idle(finite)]
    found += [*_rows(finite)]
    order = list(ADVICE_KINDS)
    return tuple(sorted(found, key=lambda one: (order.index(one.kind), one.step)))


# --------------------------------------------------------------------------------------------------
# Infinities and NaN
# --------------------------------------------------------------------------------------------------


def _not_finite(records: Sequence[RunRecord]) -> Iterator[Advice]:
    """Yields advice for each first value that is not finite, at its first step.

    A gradient that overflows under a loss scale, and is skipped, is the scale's own search. Params
    and state that are not finite after a step that was not are its consequence.
    """
    facts = (one for r in records if not r["outputs"] for one in (*r["entered"], *r["made"]))
    usual = {identity_of(one) for one in facts}
    origins: dict[tuple[Any, ...], list[tuple[RunRecord, dict[str, Any]]]] = {}
    last_finite, is_later = None, False
    for record in records:
        first = first_of(record, usual) if record["outputs"] else None
        if first is None:
            last_finite = record["step"]
            continue
        if _is_search(record, first):
            continue
        kinds = {one["path"]: one["kind"] for one in record["entered"]}
        kind = kinds.get(first["entered"], "")
        if not (is_later and kind in ("param", "state")):
            before = last_finite if kind in ("param", "state") else None
            place = kind, identity_of(first), before
            origins.setdefault(place, []).append((record, first))
        is_later = True
    for (kind, _, before), alike in origins.items():
        (record, first), until = alike[0], alike[-1][0]["step"]
        name, message = _cause(first, kind, before)
        times = f" In {len(alike)} steps until {until}." if len(alike) > 1 else ""
        layers = () if first["layer"] is None else (first["layer"],)
        message = f"{message}{times}"
        yield Advice(name, first["path"], record["step"], until, message, first["line"], layers)


def _cause(first: Mapping[str, Any], kind: str, before: int | None) -> tuple[str, str]:
    """Returns the kind of a first value that is not finite, and what is known of it."""
    operation, dtype = first["operation"], first["dtype"]
    if kind in ("param", "state"):
        said = f"{first['entered']} is not finite before this step"
        if before is None:
            return STATE, f"{said}, the first recorded one."
        return STATE, (
            f"{said}, and is at the last recorded one, {before}. monitor(..., on_nonfinite=True) "
            "records the step between them that makes it so."
        )
    if kind == "input":
        return INPUT, f"The input {first['entered']} is not finite before the model runs."
    if operation == "output":
        return NOT_FINITE, f"{first['path']} is not finite."
    value = {"inf": "infinite", "nan": "NaN"}[first["value"]]
    said = f"{operation} ({first['direction']}) in {dtype} is {value}"
    if not first["is_fresh"]:
        return NOT_FINITE, f"{said}: an operand is infinite."
    if " " in operation:  # of an infinite constant
        return NOT_FINITE, f"{said}."
    if (operation, first["value"]) in _DIVISIONS:
        tiny = float(jnp.finfo(dtype).smallest_subnormal) / 2
        rounds = f" {dtype} rounds numbers below {tiny:.2g}, such as an epsilon, to 0."
        is_zero = first["value"] == "inf" and dtype == "float16"
        return DIVISION, f"{said}: {_DIVISIONS[operation, first['value']]}.{rounds * is_zero}"
    is_cast = operation == "convert_element_type"
    if operation in _OTHER or (first["value"] == "nan" and not is_cast):
        return NOT_FINITE, f"{said}, and its operands are finite."
    remedy = ""
    if dtype == "float16":
        remedy = " mixed_bfloat16 in place of mixed_float16 has the range of float32."
        if first["direction"] == "backward":
            remedy += ' Or take mixed_precision(..., loss_scale="dynamic"), which lowers a scale.'
    return OVERFLOW, f"{said}: it exceeds {float(jnp.finfo(dtype).max):.6g}.{remedy}"


def _is_search(record: RunRecord, first: Mapping[str, Any]) -> bool:
    """Returns whether a dynamic loss scale handles it: gradients overflow, the step is skipped."""
    is_backward = first["direction"] == "backward"
    return bool(is_backward and record["skipped"] and (record["loss_scale"] or 1.0) != 1.0)


# --------------------------------------------------------------------------------------------------
# The loss scale
# --------------------------------------------------------------------------------------------------


def _scale(records: Sequence[RunRecord]) -> Iterator[Advice]:
    """Yields advice on the loss scale."""
    scaled = [record for record in records if record["loss_scale"] is not None]
    scales = {float(record["loss_scale"]) for record in scaled}
    missed = [
        one
        for one in scaled
        if one["skipped"] and not (one["first"] and one["first"]["direction"] == "forward")
    ]
    if low := [one for one in scaled if float(one["loss_scale"]) < 1]:
        said = f"The loss scale fell to {min(scales):.3g}. Below 1 it loses gradients: that of"
        yield _on_scale(low, f'{said} loss_scale="dynamic" is never below 1.')
    at_floor = [one for one in missed if float(one["loss_scale"]) == 1]
    if len(at_floor) >= LEAST:
        said = f"The loss scale is at its minimum of 1, and gradients of {len(at_floor)} steps"
        yield _on_scale(at_floor, f"{said} overflow.")
    if len(scales) == 1 and min(scales) > 1 and len(missed) >= SAME_SCALE:
        said = f"Gradients overflow at the loss scale {min(scales):g} in {len(missed)} steps."
        yield _on_scale(missed, f'{said} It stays: loss_scale="dynamic" halves it.')


def _on_scale(alike: Sequence[RunRecord], message: str) -> Advice:
    firsts = [one["first"] for one in alike if one["first"]]
    paths = collections.Counter(first["path"] for first in firsts)
    path = paths.most_common(1)[0][0] if paths else ""
    line = next((first["line"] for first in firsts), "")
    return Advice(SCALE, path, alike[0]["step"], alike[-1]["step"], message, line)


# --------------------------------------------------------------------------------------------------
# Params, gradients and updates
# --------------------------------------------------------------------------------------------------


def _idle(records: Sequence[RunRecord]) -> Iterator[Advice]:
    """Yields advice on a run whose params are the same in many records in a row."""
    found = []
    for before, record in itertools.pairwise(records):
        params = _params(record)
        is_idle = bool(params) and params == _params(before) and not _has(record, "update")
        found.append((record["step"], is_idle and _has(record, "gradient"), record))
    for streak in _streaks(found, IDLE - 1):
        made = [{identity_of(one): one for one in each["made"]} for _, _, each in streak]
        common = [one for key, one in made[0].items() if all(key in each for each in made)]
        said, path, line = "No param changes: updates are 0, and gradients are not.", "", ""
        if common:
            first = common[0]
            path, line = first["path"], first["line"]
            said += f" In these steps {first['operation']} in {first['dtype']} is {first['value']}."
        yield Advice(NO_UPDATE, path, streak[0][0], streak[-1][0], said, line)


def _params(record: RunRecord) -> dict[str, Any]:
    """Returns the numbers of the params of a record, by their paths."""
    return {row["path"]: row["numbers"] for row in record["rows"] if row["kind"] == "param"}


def _has(record: RunRecord, kind: str) -> bool:
    """Returns whether some number of a kind is not 0."""
    rows = (row for row in record["rows"] if row["kind"] == kind)
    return any(max(_layers(row["numbers"]["largest"])) > 0 for row in rows)


def _rows(records: Sequence[RunRecord]) -> Iterator[Advice]:
    """Yields advice on updates that round away, and on float16 gradients that are too small."""
    params = {
        row["path"]: row["dtype"] for r in records for row in r["rows"] if row["kind"] == "param"
    }
    series: dict[tuple[str, str, str], list[tuple[int, dict[str, Any]]]] = {}
    for record in records:
        for row in record["rows"]:
            dtype = params.get(row["path"], row["dtype"])
            if row["kind"] == "update" and jnp.dtype(dtype).itemsize < 4:
                series.setdefault((row["path"], "lost", dtype), []).append((record["step"], row))
            if row["kind"] in ("cotangent", "gradient", "update") and row["dtype"] == "float16":
                key = row["path"], "below", row["kind"]
                series.setdefault(key, []).append((record["step"], row))
    for (path, name, what), rows in series.items():
        found = [(step, _worst_layers(row["numbers"], name), row) for step, row in rows]
        if alike := next(_streaks(found, LEAST), None):
            (start, _, row), until = alike[0], alike[-1][0]
            layers = tuple(sorted({i for _, each, _ in alike for i in each if i is not None}))
            share = sorted(max(each.values()) for _, each, _ in alike)[len(alike) // 2]
            message = _on_row(name, what, share)
            kind = VANISHED if name == "lost" else UNDERFLOW
            yield Advice(kind, path, start, until, message, row["line"], layers)


def _on_row(name: str, what: str, share: float) -> str:
    part = "100%" if share >= 1 else f"{min(share, 0.999):.1%}"
    if name == "lost":
        return (
            f"{part} of the updates of this {what} param round away: they are below half of its "
            'last digit. Wrap the optimizer: policy.mixed_precision(tx, ..., master_weights="auto")'
            " keeps the float32 value; or store the param in float32."
        )
    if what == "update":
        remedy = "Run the optimizer in float32: policy.mixed_precision(tx, ...)."
    else:
        remedy = 'Scale the loss: mixed_precision(..., loss_scale="dynamic"), or take'
        remedy += " mixed_bfloat16."
    noun = "updates" if what == "update" else "gradients"
    return f"{part} of the non-zero {noun} are subnormal in float16. {remedy}"


def _worst_layers(numbers: Mapping[str, Any], name: str) -> dict[int | None, float]:
    """Returns the shares of non-zero elements, by layer, that are too large."""
    is_stack = isinstance(numbers["zeros"], list)
    pairs = zip(_layers(numbers.get(name, 0.0)), _layers(numbers["zeros"]), strict=False)
    shares = (each / (1 - zeros) if zeros < 1 else 0.0 for each, zeros in pairs)
    return {i if is_stack else None: share for i, share in enumerate(shares) if share >= HALF}


def _layers(numbers: Any) -> list[float]:
    return list(map(float, numbers)) if isinstance(numbers, list) else [float(numbers)]


def _streaks(
    found: Iterable[tuple[int, Any, Any]], least: int
) -> Iterator[list[tuple[int, Any, Any]]]:
    """Yields the runs of `least` or more in a row whose second member is true."""
    for is_some, streak in itertools.groupby(found, key=lambda one: bool(one[1])):
        alike = list(streak)
        if is_some and len(alike) >= least:
            yield alike

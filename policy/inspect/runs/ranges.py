"""Advice on numbers that their dtype does not hold: updates, gradients, codes, activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from policy.inspect.runs import advice_kinds as kinds
from policy.inspect.runs.advice_kinds import Advice, rule, share
from policy.inspect.runs.history import Rows, Series, longest_streak

_LIMIT = 65504.0  # of float16
_SMALL = 2.0**-14  # the least normal number of float16
_WIDE = ("float32", "float64")


def _advice(kind: str, row: Series, places: tuple[int, int], message: str) -> Advice:
    steps = int(row.steps[places[0]]), int(row.steps[places[1]])
    layers = () if row.layer is None else (row.layer,)
    return Advice(kind, row.path, *steps, message, row.line, layers)


def _lasting(flags: np.ndarray, least: int = kinds.LEAST) -> tuple[int, int] | None:
    """Returns the first and last place of the longest streak; None if it is too short."""
    found = longest_streak(flags)
    return found if found is not None and found[1] - found[0] + 1 >= least else None


def _of_nonzero(row: Series, name: str) -> np.ndarray:
    """Returns shares of the elements that are not 0."""
    rest = 1 - np.nan_to_num(row["zeros"])
    return np.divide(row[name], rest, out=np.zeros_like(rest), where=rest > 0)


def vanished(row: Series, rows: Rows) -> Iterator[Advice]:
    """Yields advice on updates that round away, as those of bfloat16 params below half an ulp."""
    if row.kind != "update" or "lost" not in row.numbers:
        return
    param = rows.get((row.path, "param", row.layer))
    dtype = row.dtype if param is None else param.dtype
    places = _lasting(_of_nonzero(row, "lost") >= kinds.HALF)
    if dtype in _WIDE or places is None:
        return
    part = share(float(np.median(_of_nonzero(row, "lost")[places[0] : places[1] + 1])))
    message = (
        f"{part} of the updates of this {dtype} param round away: they are below half of its last "
        'digit. Wrap the optimizer: policy.mixed_precision(tx, ..., master_weights="auto") keeps '
        "the float32 value; or store the param in float32."
    )
    yield _advice(kinds.VANISHED, row, places, message)


def underflow(row: Series, rows: Rows) -> Iterator[Advice]:
    """Yields advice on float16 gradients and updates that are too small for it."""
    if row.dtype != "float16" or row.kind not in ("cotangent", "gradient", "update"):
        return
    flags, what = _of_nonzero(row, "below") >= kinds.HALF, "subnormal in float16"
    gradient = rows.get((row.path, "gradient", row.layer))
    if row.kind == "update" and gradient is not None and len(gradient.steps) == len(row.steps):
        zeros = np.nan_to_num(row["zeros"])
        # All of them are 0 where a param is frozen.
        flags |= (zeros - np.nan_to_num(gradient["zeros"]) >= kinds.HALF) & (zeros < 1)
        what = "0 or subnormal in float16"
    places = _lasting(flags)
    if places is None:
        return
    noun = "updates" if row.kind == "update" else "gradients"
    lost = np.minimum(row["below"] + np.nan_to_num(row["zeros"]), 1)
    part = share(float(np.median(lost[places[0] : places[1] + 1])))
    remedy = (
        "Run the optimizer in float32: policy.mixed_precision(tx, ...)."
        if row.kind == "update"
        else 'Scale the loss: mixed_precision(..., loss_scale="dynamic"); or take mixed_bfloat16.'
    )
    yield _advice(kinds.UNDERFLOW, row, places, f"{part} of these {noun} are {what}. {remedy}")


def near_overflow(row: Series, _: Rows) -> Iterator[Advice]:
    """Yields advice on float16 activations that grow towards 65504.

    Gradients are left out: a dynamic loss scale keeps them near the limit.
    """
    if row.dtype != "float16" or row.kind != "activation" or len(row.steps) < 2 * kinds.LEAST:
        return
    largest = row["largest"]
    if not np.isfinite(largest).all() or largest.min() <= 0 or largest[-1] < _LIMIT / 8:
        return
    half = len(largest) // 2
    early, late = np.median(largest[:half]), np.median(largest[half:])
    steps = float(np.median(row.steps[half:]) - np.median(row.steps[:half]))
    if late < 1.5 * early or largest[-1] < late:
        return
    left = math.log(_LIMIT / largest[-1]) / math.log(late / early) * steps
    if left > row.steps[-1] - row.steps[0]:
        return
    message = (
        f"The largest activation is {largest[-1]:.3g}, {share(largest[-1] / _LIMIT)} of float16's "
        f"limit, and {late / early:.2g} times as large as in the first half: at this rate it "
        f"overflows in about {max(left, 1):.0f} steps. {rule(row.path)}; or take mixed_bfloat16."
    )
    yield _advice(kinds.NEAR_OVERFLOW, row, (half, len(largest) - 1), message)


def eight_bits(row: Series, _: Rows) -> Iterator[Advice]:
    """Yields advice on 8-bit codes whose scale is too small or too large."""
    if row.kind != "codes":
        return
    large = "too large, or few numbers are far larger than the others"
    above, below = np.nan_to_num(row["above"]), np.nan_to_num(row["below"])
    grown = (above >= kinds.GROWN[0]) & (above >= kinds.GROWN[1] * above.min())
    at_limit = (above >= kinds.SATURATION) | grown
    for kind, shares, flags, what, scale in (
        (kinds.SATURATED, above, at_limit, f"at the limit of {row.dtype}", "too small"),
        (kinds.LOST_CODES, below, below >= kinds.HALF, "0 though the numbers are not", large),
    ):
        if places := _lasting(flags, least=2):
            part = share(float(np.median(shares[places[0] : places[1] + 1])))
            dynamic = 'A policy\'s matmul="f8" or "i8" computes the scale from the array itself'
            module = row.path.rpartition("/")[0]  # the operand's name is the last one
            remedy = f"{dynamic}. {rule(module, 'bfloat16')}."
            message = f"{part} of the codes are {what}: the scale is {scale}. {remedy}"
            yield _advice(kind, row, places, message)


# --------------------------------------------------------------------------------------------------
# Zeros
# --------------------------------------------------------------------------------------------------


def dead(rows: Sequence[Series]) -> Iterator[Advice]:
    """Yields advice on modules whose outputs or gradients are all 0, and runs without updates."""
    updates = [row for row in rows if row.kind == "update"]
    gradients = [row for row in rows if row.kind == "gradient"]
    start = _first_update(updates)
    if start is None:
        yield from _no_update(updates, gradients)
        return
    reaching = _largest_by_step([row for row in rows if row.kind == "cotangent"])
    for row in rows:
        after = (row["zeros"] >= 1) & (row.steps > start)
        if row.kind == "activation" and row.size > 1 and (places := _lasting(after)):
            said = "All outputs of this module are 0"
            remedy = (
                "Look at its initial values, its inputs and the learning rate before that step."
            )
            yield _advice(kinds.DEAD, row, places, f"{said}. {remedy}")
        elif row.kind == "cotangent" and row.size > 1:
            others = np.array([reaching.get(int(step), 0.0) > 0 for step in row.steps])
            if places := _lasting(after & others):
                yield _advice(kinds.DEAD, row, places, _dead_gradients(row, reaching, places))


def _dead_gradients(row: Series, reaching: dict[int, float], places: tuple[int, int]) -> str:
    said = "All gradients that reach this module are 0, and those of others are not"
    largest = max(reaching[int(step)] for step in row.steps[places[0] : places[1] + 1])
    if row.dtype == "float16" and largest < _SMALL:
        remedy = 'They are below 6e-8 here: mixed_precision(..., loss_scale="dynamic")'
        return f"{said}. {remedy} lifts them."
    return f"{said}. Look at what reads its result: a relu below 0, a mask, a gate of 0."


def _first_update(updates: Sequence[Series]) -> int | None:
    """Returns the first step that changes a param; before any step if updates are not recorded."""
    if not updates:
        return -1
    moved = [int(row.steps[row["largest"] > 0][0]) for row in updates if (row["largest"] > 0).any()]
    return min(moved, default=None)


def _no_update(updates: Sequence[Series], gradients: Sequence[Series]) -> Iterator[Advice]:
    there = _largest_by_step(gradients)
    row = updates[0]
    flags = np.array([there.get(int(step), 0.0) > 0 for step in row.steps])
    if places := _lasting(flags, kinds.IDLE):
        said = "All updates of the run are 0, and its gradients are not"
        remedy = "Look at the learning rate's schedule. In float16 small updates are 0"
        message = f"{said}. {remedy}: policy.mixed_precision(tx, ...) runs tx in float32."
        steps = int(row.steps[places[0]]), int(row.steps[places[1]])
        yield Advice(kinds.NO_UPDATE, "", *steps, message)


def _largest_by_step(rows: Sequence[Series]) -> dict[int, float]:
    found: dict[int, float] = {}
    for row in rows:
        for step, largest in zip(row.steps, np.nan_to_num(row["largest"]), strict=True):
            found[int(step)] = max(found.get(int(step), 0.0), float(largest))
    return found

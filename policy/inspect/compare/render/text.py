"""A comparison as a table in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from policy.inspect.compare.report import OperandCodes, Row, Rows
from policy.inspect.compare.statistics import is_discrete

_TITLES = {
    "activation": "activations",
    "gradient": "gradients of activations",
    "parameter": "gradients of parameters",
    "output": "outputs",
}
_HEADS = ("error", "cosine", "underflow", "subnormal", "overflow", "largest", "of limit")


def comparison_table(comparison: Rows) -> str:
    """Returns the rows in columns, with the first jump and the notes above them."""
    rows = comparison.rows
    width = max((len(_name(row)) for row in rows), default=0)
    lines = list(_above(comparison))
    for kind, title in _TITLES.items():
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            lines += ["", f"{title:<{max(width, 24)}}" + "".join(f"{head:>11}" for head in _HEADS)]
            lines += [_line(row, max(width, 24), comparison.first_jump) for row in of_kind]
    return "\n".join([*lines, *_codes(comparison.codes)])


def _codes(codes: Sequence[OperandCodes]) -> Iterable[str]:
    """Yields the table of operands in 8 bits."""
    if not codes:
        return
    width = max(24, *(len(one.path) for one in codes))
    heads = f"{'operand':>11}{'dtype':>15}{'saturated':>11}{'underflow':>11}"
    yield from ("", f"{'operands in 8 bits':<{width}}{heads}")
    for one in codes:
        shares = f"{_share(one.saturated):>11}{_share(one.underflow):>11}"
        path = one.path or "(outside of any module)"
        yield f"{path:<{width}}{one.operand:>11}{one.dtype:>15}{shares}"


def _above(comparison: Rows) -> Iterable[str]:
    how = {"scope": "layers that obey it", "autocast": "autocast", "as written": "its own dtypes"}[
        comparison.route
    ]
    policy = f" under {comparison.policy}" if comparison.policy else ""
    yield f"{comparison.name or 'function'}{policy} (by {how}) against float32"
    yield f"The error jumps {_jump(comparison)}."
    yield from comparison.notes


def _jump(comparison: Rows) -> str:
    path = comparison.first_jump
    if path is None:
        return "nowhere"
    step = "" if comparison.jump_step is None else f", step {comparison.jump_step} of its scan"
    row = next((row for row in comparison.rows if row.path == path and row.is_jump), None)
    made = "" if row is None or not row.source else f", in {row.primitive}, {row.source}"
    return f"first at {path or '(outside of any module)'}{step}{made}"


def _name(row: Row) -> str:
    return row.path or ("(result)" if row.kind == "output" else "(outside of any module)")


def _line(row: Row, width: int, first_jump: str | None) -> str:
    mark = "  <- jumps" if row.is_jump else ""
    if is_discrete(np.dtype(row.dtype)):
        return (
            f"{_name(row):<{width}}{_number(row.error):>11}  {_share(row.error)} of the "
            f"{row.dtype} differ" + mark
        )
    cells: Sequence[str] = (
        _number(row.error),
        f"{row.cosine:.6f}",
        _share(row.underflow),
        _share(row.subnormal),
        _share(row.overflow),
        _number(row.largest),
        _share(row.headroom),
    )
    steps = f"  worst in step {_worst_step(row.steps)} of {len(row.steps)}" if row.steps else ""
    return f"{_name(row):<{width}}" + "".join(f"{cell:>11}" for cell in cells) + mark + steps


def _worst_step(steps: Sequence[object]) -> int:
    return max(range(len(steps)), key=lambda i: _worst(steps[i]))


def _worst(step: object) -> float:
    return max(map(_worst, step), default=0.0) if isinstance(step, tuple) else float(step)  # type: ignore[arg-type]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _share(share: float) -> str:
    if not math.isfinite(share):
        return str(share)
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"

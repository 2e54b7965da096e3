"""Turns measurements into the rows of a comparison, and finds where the error jumps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from policy.inspect.compare.comparison import Comparison
from policy.inspect.compare.log import Log, Measurement
from policy.inspect.compare.report import OperandCodes, Row, RowKind
from policy.inspect.compare.statistics import NAMES, is_discrete, limit_of
from policy.inspect.traced.call import Program
from policy.programs.dtypes import is_half
from policy.programs.jaxprs import opened
from policy.programs.paths import naming, spelled
from policy.programs.reading.matmul_operands import CodedSide
from policy.programs.rewriting.placed_interpreter import ModulePass, lost_prefixes
from policy.programs.rewriting.upcast import dtypes_of

# The factor by which an error exceeds its inputs' to be the module's own.
JUMP = 8.0
# A sum this much smaller than its terms is zero except for float32 rounding.
_ZERO = 1e-5
_KINDS = ("activation", "gradient", "parameter", "output")
_ERROR, _UNDERFLOW = NAMES.index("error"), NAMES.index("underflow")
_LARGEST, _REFERENCE = NAMES.index("largest"), NAMES.index("reference_largest")


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """Measurements of one value: (..., len(NAMES)), with an axis for each enclosing scan."""

    of: Measurement
    array: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        return self.array[..., _ERROR]

    @property
    def worst(self) -> np.ndarray:
        return self.array.reshape(-1, len(NAMES)).max(0)

    @property
    def headroom(self) -> float:
        return float(self.worst[_LARGEST]) / limit_of(self.of.dtype)


class Findings:
    """All measurements, in program order."""

    def __init__(self, log: Log, notes: dict[int, Any], program: Program):
        self.log = _with_whole_paths(log)
        self.numbers = [
            RowNumbers(m, np.asarray(notes[m.key], np.float64))
            for m in log.measurements
            if m.key in notes
        ]
        halves = {dtype for dtype in dtypes_of(opened(program.jaxpr)[0]) if is_half(dtype)}
        # The error of one rounding: smaller errors can't be distinguished.
        self.floor = max(
            (float(jnp.finfo(dtype).eps) for dtype in halves),
            default=float(jnp.finfo(np.float32).eps),
        )

    @functools.cached_property
    def _entered(self) -> dict[ModulePass, list[RowNumbers]]:
        return {
            place: [n for n in self.numbers if self._enters(n, place)] for place in self.log.places
        }

    def leaving(self, place: ModulePass) -> list[RowNumbers]:
        """Returns the values that leave a place, and gradients of parameters only if there are
        none.
        """
        found = [n for n in self.numbers if place in n.of.left]
        is_all = place.direction != "backward" or not found
        return found + [
            n for n in self.numbers if is_all and place in n.of.returned and n not in found
        ]

    def entering(self, place: ModulePass, numbers: RowNumbers, what: int = _ERROR) -> np.ndarray:
        """Returns the worst error that entered a place before a value, in each step of a scan."""
        worst = np.zeros(numbers.errors.shape)
        for other in self._entered.get(place, ()):
            if other.of.key < numbers.of.key:
                found = other.array[..., what]
                worst = np.maximum(
                    worst, found if found.shape == worst.shape else found.max(initial=0)
                )
        return worst

    def _enters(self, numbers: RowNumbers, place: ModulePass) -> bool:
        """Returns whether a value enters a place; backward reads the module's activations, too."""
        forward = ModulePass(place.path, "forward")
        return place in numbers.of.entered or (
            place.direction == "backward"
            and (forward in numbers.of.entered or forward in numbers.of.left)
        )

    def jumps(self, place: ModulePass, numbers: RowNumbers) -> np.ndarray:
        """Returns the steps in which a value's error is made at the place itself.

        A gradient that is zero except for rounding, such as that of a bias before a normalisation,
        has no meaningful error.
        """
        jumps = numbers.errors > JUMP * np.maximum(self.entering(place, numbers), self.floor)
        if place.direction == "backward":
            reference = numbers.array[..., _REFERENCE]
            is_zero = reference < _ZERO * self.entering(place, numbers, _REFERENCE)
            jumps &= (
                ~is_zero | ~np.isfinite(numbers.errors) | (numbers.array[..., _UNDERFLOW] > 0.5)
            )
        return jumps

    def first_error(self, place: ModulePass) -> RowNumbers | None:
        """Returns the first value in a place whose error is made there, or None."""
        depth = len(place.path)
        inside = (n for n in self.numbers if n.of.made.path[:depth] == place.path)
        return next(
            (
                n
                for n in inside
                if n.of.made.direction == place.direction and self.jumps(place, n).any()
            ),
            None,
        )

    def first_jump(self) -> tuple[ModulePass, int | None] | None:
        """Returns the first place with a jump, the innermost if nested, and its scan's step."""
        found: list[tuple[RowNumbers, ModulePass, int | None]] = []
        for numbers in self.numbers:
            if found and not _is_same_loop(found[0][0], numbers):
                break
            forward = (place for place in numbers.of.returned if place.direction == "forward")
            places = sorted((*numbers.of.left, *forward), key=lambda place: -len(place.path))
            for place in places:
                jumps = self.jumps(place, numbers)
                if jumps.any():
                    found.append((numbers, place, _first(jumps, place)))
                    break
        if not found:
            return None
        _, place, step = min(found, key=lambda item: _turn(item[2] or 0, item[1]))
        return place, step


def _with_whole_paths(log: Log) -> Log:
    """Returns the log with the path prefixes that JAX has dropped."""
    if not any(place.direction == "backward" for place in log.places):
        return log
    lost = lost_prefixes(place.path for place in log.places)
    whole = lambda places: {p._replace(path=lost.get(p.path, p.path)): None for p in places}  # noqa: E731
    measurements = [
        dataclasses.replace(
            m,
            made=next(iter(whole([m.made]))),
            left=whole(m.left),
            entered=whole(m.entered),
            returned=whole(m.returned),
        )
        for m in log.measurements
    ]
    places = {
        ModulePass(p.path[:n], p.direction): None for p in whole(log.places) for n in _lengths(p)
    }
    return Log(places, measurements)


def _lengths(place: ModulePass) -> range:
    return range(1 if place.path else 0, len(place.path) + 1)


def _first(jumps: np.ndarray, place: ModulePass) -> int | None:
    """Returns the first step of the outermost scan with a jump; None outside of any.

    A backward pass runs through the steps in reverse.
    """
    if not jumps.ndim:
        return None
    steps = np.flatnonzero(jumps.reshape(jumps.shape[0], -1).any(1))
    return int(steps[-1] if place.direction == "backward" else steps[0])


def _turn(step: int, place: ModulePass) -> int:
    return -step if place.direction == "backward" else step


def _is_same_loop(one: RowNumbers, other: RowNumbers) -> bool:
    """Returns whether two values share a loop: then the later may go wrong in an earlier step."""
    return one.errors.ndim > 0 and one.of.bodies[:1] == other.of.bodies[:1]


def comparison_of(
    program: Program,
    log: Log,
    notes: dict[int, Any],
    has_nan: Sequence[Any],
    name: str,
    policy: str,
) -> Comparison:
    """Returns the comparison, from the numbers that its program returned."""
    findings = Findings(log, notes, program)
    with naming(place.path for place in findings.log.places):
        jump = findings.first_jump()
        rows = [*_modules(findings), *_returned(program, findings)]
        unpaired = tuple(dict.fromkeys(map(spelled, program.reference.unpaired)))
        return Comparison(
            tuple(sorted(rows, key=lambda row: _KINDS.index(row.kind))),
            None if jump is None else spelled(jump[0].path),
            None if jump is None else jump[1],
            tuple(_notes(program, rows, unpaired, has_nan)),
            name,
            policy,
            program.route,
            unpaired,
            tuple(_codes(log, notes)),
        )


def _codes(log: Log, notes: dict[int, Any]) -> Iterable[OperandCodes]:
    """Returns the operands of matmuls in 8 bits, one for each module and side."""
    lost = lost_prefixes(place.path for place in log.places)
    found: dict[tuple[str, CodedSide, str], np.ndarray] = {}
    for codes in log.codes:
        if codes.key not in notes:
            continue
        numbers = np.asarray(notes[codes.key], np.float64).reshape(-1, 2).max(0)
        for path in codes.of.paths:
            key = spelled(lost.get(path, path)), codes.of.operand, str(np.dtype(codes.dtype))
            found[key] = np.maximum(found[key], numbers) if key in found else numbers
    for (path, operand, dtype), (saturated, underflow) in found.items():
        yield OperandCodes(path, operand, dtype, float(saturated), float(underflow))


def _modules(findings: Findings) -> Iterable[Row]:
    for place in findings.log.places:
        leaving = findings.leaving(place)
        if leaving:
            kind = "gradient" if place.direction == "backward" else "activation"
            yield _row(spelled(place.path), kind, leaving, findings, place)


def _returned(program: Program, findings: Findings) -> Iterable[Row]:
    for numbers in findings.numbers:
        output = numbers.of.output
        if output is not None and output < len(program.outputs):
            yield _row(program.outputs[output], "output", [numbers], findings)
        elif output is not None:
            yield _row(
                program.gradients[output - len(program.outputs)], "parameter", [numbers], findings
            )


def _row(
    path: str,
    kind: RowKind,
    leaving: list[RowNumbers],
    findings: Findings,
    place: ModulePass | None = None,
) -> Row:
    worst = np.max([numbers.worst for numbers in leaving], axis=0)
    of = dict(zip(NAMES, map(float, worst), strict=True))
    nearest = max(
        leaving, key=lambda numbers: (not is_discrete(numbers.of.dtype), numbers.headroom)
    )
    culprit = (place and findings.first_error(place)) or max(
        leaving, key=lambda n: float(n.worst[_ERROR])
    )
    in_steps = [numbers for numbers in leaving if numbers.errors.ndim]
    shape = max((n.errors.shape for n in in_steps), key=len, default=())
    steps = [n.errors for n in in_steps if n.errors.shape == shape]
    return Row(
        path,
        kind,
        of["error"],
        1 - of["distance"],
        of["underflow"],
        of["subnormal"],
        of["overflow"],
        float(nearest.worst[_LARGEST]),
        limit_of(nearest.of.dtype),
        str(np.dtype(nearest.of.dtype)),
        of["reference_largest"],
        of["undefined"],
        max((float(findings.entering(place, n).max(initial=0)) for n in leaving), default=0.0)
        if place
        else 0.0,
        _nested(np.max(steps, axis=0).tolist()) if steps else (),
        culprit.of.primitive,
        culprit.of.source,
        place is not None
        and any(bool(findings.jumps(place, numbers).any()) for numbers in leaving),
    )


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def _notes(
    program: Program, rows: Sequence[Row], unpaired: Sequence[str], has_nan: Sequence[Any]
) -> Iterable[str]:
    if program.refused:
        yield (
            f"The function can't be traced in float32 ({program.refused}). The reference is the "
            "same program with wider dtypes, whose constants keep their rounding to half precision."
        )
    elif unpaired:
        yield (
            f"Constants have no counterpart in float32 at {', '.join(map(repr, unpaired))}. They "
            "keep their rounding to half precision in the reference."
        )
    names = [name for name, nan in zip(program.arguments.names(), has_nan, strict=True) if nan]
    if names:
        yield f"NaN in the inputs: {', '.join(names)}. Values that depend on it can't be compared."
    undefined = [row.path for row in rows if row.undefined and row.kind == "activation"]
    if undefined:
        yield (
            f"float32 itself is infinite or NaN in {len(undefined)} rows; the first is "
            f"{undefined[0]!r}."
        )
    gradients = [row for row in rows if row.kind == "parameter"]
    largest = max((row.reference_largest for row in gradients), default=0.0)
    zero = [
        row.path for row in gradients if row.error > 1 and row.reference_largest < _ZERO * largest
    ]
    if zero:
        yield (
            "These gradients are zero up to rounding in float32 too, so their errors mean nothing: "
            f"{', '.join(zero)}."
        )
    yield from _equal(program, rows)


def _equal(program: Program, rows: Sequence[Row]) -> Iterable[str]:
    """Yields a note if no difference was measured."""
    if not rows:
        yield "Nothing was measured: neither a module nor the function returns numbers."
    elif not any(row.error or row.undefined for row in rows):
        outputs = sum(row.kind == "output" for row in rows)
        if outputs < len(program.outputs):
            yield (
                "No measured value differs from float32; "
                f"{len(program.outputs) - outputs} outputs were not measured."
            )
        else:
            yield "Nothing differs from float32: the policy changes nothing here."

"""Measures a function under a policy against the same function in float32, module by module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from policy.autocasting.parameters import ParamsArgument
from policy.core.policy import Policy
from policy.core.precedence import collecting
from policy.core.rules import PolicyRules, RulesLike
from policy.inspect.compare.comparison import Comparison, OperandCodes, Row, RowKind
from policy.inspect.compare.recorder import Log, Measurement, Recording
from policy.inspect.compare.statistics import NAMES, is_discrete, limit_of
from policy.inspect.compare.two_programs import (
    Beside,
    beside_each_other,
    beside_itself,
    other_program,
    require_alike,
)
from policy.inspect.traced.call import (
    Call,
    Program,
    checked_policy,
    checked_rules,
    program_of,
    short_text,
)
from policy.inspect.traced.matmul_operands import CodedSide
from policy.inspect.traced.module_paths import lost_prefixes
from policy.inspect.traced.passes import Device, require_device
from policy.inspect.traced.placed import ModulePass
from policy.inspect.traced.upcast import dtypes_of
from policy.programs.dtypes import F32, is_half
from policy.programs.frameworks import with_policy
from policy.programs.jaxprs import opened
from policy.programs.paths import naming, spelled
from policy.programs.tracing.trace import function_name


def compare(
    fn: Any,
    *args: Any,
    policy: Policy | str | None = None,
    rules: RulesLike | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    loss_scale: float = 1.0,
    on: Device | None = None,
    beside: Policy | str | Callable[..., Any] | tuple[Any, ...] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compares a call under `policy` with the same call in float32, module by module.

    With `beside`, the reference is another call instead.

    The reference is the same program in float32, with the constants of the function traced in
    float32, which are not rounded. Each is compiled and run by itself. Values that pass from one
    module to another, and the function's outputs, stay in memory until both have run, and are then
    reduced to a few numbers on the device, in each step of a scan. Modules are linen's, nnx's, or
    parts named with `jax.named_scope`. Callbacks to the host that return values are called in both.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = lambda w, x: jnp.sum(jnp.dot(x, w))
    >>> w, x = jnp.full((4, 4), 1 / 3), jnp.ones((2, 4))
    >>> comparison = policy.compare(fn, w, x, policy="mixed_bfloat16")
    >>> 1e-4 < comparison.error < 1e-2
    True

    ``print(comparison)`` shows a table with the error, cosine, underflow and overflow of each path;
    ``comparison.first_jump`` is the first module that makes an error, such as "layer_12/attention".

    Args:
      fn: any function of arrays, bound method, or nnx module; a module's `apply`. It is not
        modified.
      *args, **kwargs: the arguments of the call: arrays, in the dtypes that `fn` is normally called
        with.
      policy: the policy to run under, applied through layers that obey `use_policy`; if that
        changes no matmul, through `autocast`. None: as it is written, with its own half dtypes.
      rules: policies by module path or layer class, beside `policy`.
      backward: whether to compare gradients too. The function then returns a loss, or (loss, aux).
      params: the arguments that are parameters, for gradients and for `autocast`; see
        `policy.audit`.
      loss_scale: the factor of the loss before differentiation. It affects underflow, but not
        errors.
      on: "tpu" or "gpu": the program's float32 matmuls below the highest precision are multiplied
        as these devices do, in passes of bfloat16 or in TF32. None multiplies float32.
      beside: the reference, in place of float32: another policy for the same call; another function
        of the same arguments; or ``(function, *args)``, with `kwargs` too. Both run by themselves,
        and each value that a module returns is compared with that of the module of the same path. A
        scan over tokens may stand for an axis: a sampler's steps, (T, B, 1, ...), are compared with
        a trainer's (B, T, ...). With a function, each follows its own policies and the scope.

    Returns:
      The rows for each path; see `Comparison`.

    Raises:
      TypeError: `fn` is not a function; there are no arrays, or only their shapes; `params` doesn't
        select arguments; with `backward`, there is no loss.
      ValueError: the policy is malformed, or can't be honored here; `rules` without `policy`;
        the model carries a policy of another dtype, or, with `rules`, was built under a policy;
        `loss_scale` is not positive, or `on` is no device; `params` names arguments where modules
        hold the parameters; with `backward`, there is no floating argument; `beside` is a function
        and `policy` is given; the two functions return other trees or shapes.
    """
    rules = checked_rules(rules, policy)
    policy = checked_policy(policy)
    if on is not None:
        require_device(on)
    if not isinstance(loss_scale, (int, float)) or not (0 < loss_scale < float("inf")):
        raise ValueError(f"loss_scale should be a positive number, but got {loss_scale!r}.")
    scale = float(loss_scale) if backward else None
    call = Call.measured("compare", fn, args, kwargs, params, scale)
    with collecting(policy, rules) as asked:
        program = call.under(policy, rules) if beside else program_of(call, policy, rules)
    text = "" if policy is None else short_text(policy)
    if policy is not None and program.route == "scope":
        text = obeyed_policy(policy, rules, asked.of_models)
        if rules is not None and with_policy(fn, args, policy, PolicyRules()) is not None:
            raise ValueError(
                f"rules= changes nothing here: the nnx model obeys {text!r}, which it was built "
                "under. Give a copy with the rules, as mpmodules.nnx.apply_policy(model, policy, "
                "rules) returns it, without policy= and rules=."
            )
    if beside is None:
        names = function_name(fn), ""
        recordings = [Recording(program, on), Recording(program, None, "float32")]
        found = beside_itself(*recordings)
    else:
        other, name = other_program(beside, fn, args, kwargs, policy, params, scale)
        names = function_name(fn), name
        require_alike(program, other, names)
        recordings = [Recording(one, on, follows_casts=True) for one in (program, other)]
        found = beside_each_other(*recordings)
    return _comparison(found, recordings, names, text)


def obeyed_policy(policy: Policy, rules: PolicyRules | None, models: Collection[Policy]) -> str:
    """Returns the text of the policies that models obey under the scope of a policy.

    Args:
      policy, rules: the scope's.
      models: the policies of whole models, as they were traced.

    Raises:
      ValueError: all of them carry policies that compute in another dtype.
    """
    given = {each.compute_dtype for each in (policy, *(each for _, each in rules or ()))}
    names = " and ".join(sorted(map(short_text, models)))
    if models and given.isdisjoint(one.compute_dtype for one in models):
        raise ValueError(
            f"policy={short_text(policy)!r} changes nothing here: the model obeys {names!r}, which "
            "it was built under or has as its dtype_policy. Leave out policy= to compare it as it "
            "is, or give a model without a policy."
        )
    return names if models and rules is None else short_text(policy)


def _comparison(
    found: Beside, recordings: Sequence[Recording], names: tuple[str, str], policy: str
) -> Comparison:
    """Returns the result of comparing two programs, of which the second may be float32.

    Args:
      found: the values of the first compared with those of the second.
      recordings: of both.
      names: of both; "" for float32.
      policy: the policy's text form.
    """
    program, beside = recordings[0].program, names[1]
    programs = [one.program for one in recordings] if beside else [program]
    findings = Findings(found.log, found.numbers, *programs)
    codes = () if beside else _codes(found.log, recordings[0].notes)
    alone = [place for places in found.alone for place in places]
    with naming(place.path for place in (*findings.places, *alone)):
        jump, step = findings.first_jump()
        rows = sorted(_rows(program, findings), key=lambda row: _KINDS.index(row.kind))
        unpaired = tuple(dict.fromkeys(map(spelled, program.reference.unpaired)))
        return Comparison(
            tuple(rows),
            None if jump is None else spelled(jump.path),
            step,
            tuple(_notes(found, recordings, names, rows)),
            names[0],
            policy,
            program.route,
            unpaired,
            tuple(codes),
            beside,
            tuple(dict.fromkeys(spelled(place.path) for place in alone)),
        )


# --------------------------------------------------------------------------------------------------
# The rows, and the place where the error jumps
# --------------------------------------------------------------------------------------------------

# The factor by which an error exceeds its inputs' to be the module's own.
JUMP = 8.0
# A sum this much smaller than its terms is zero except for float32 rounding.
_ZERO = 1e-5
# The relative error of one rounding of an array, by the norm, in eps: errors are uniform within
# half of the last digit, and mantissas log-uniform.
_ROUNDING = math.sqrt(math.log(2) / 18)
_LISTED = 8  # paths in a note
_KINDS = ("activation", "gradient", "parameter", "output")
_ERROR, _UNDERFLOW = NAMES.index("error"), NAMES.index("underflow")
_LARGEST, _REFERENCE = NAMES.index("largest"), NAMES.index("reference_largest")


class Findings:
    """All measurements with their numbers, and all places, in program order.

    The path prefixes that JAX has dropped are restored.
    """

    def __init__(self, log: Log, notes: Mapping[int, Any], *programs: Program):
        places = _with_prefixes(log.places)
        is_backward = any(place.direction == "backward" for place in places)
        lost = lost_prefixes(place.path for place in places) if is_backward else {}

        def whole(places: Iterable[ModulePass]) -> dict[ModulePass, None]:
            return {p._replace(path=lost.get(p.path, p.path)): None for p in places}

        self.places = _with_prefixes(whole(places))
        self.measurements = [
            dataclasses.replace(
                m,
                made=next(iter(whole([m.made]))),
                left=whole(m.left),
                entered=whole(m.entered),
                returned=whole(m.returned),
                numbers=np.asarray(notes[m.key], np.float64),
            )
            for m in log.measurements
            if m.key in notes
        ]
        self._entered = {
            place: [one for one in self.measurements if _enters(one, place)]
            for place in self.places
        }
        dtypes = [dtype for one in programs for dtype in dtypes_of(opened(one.jaxpr)[0])]
        halves = set(filter(is_half, dtypes))
        self._made = {
            place: [
                (one.key, one.errors.size) for one in self.measurements if _is_made_in(one, place)
            ]
            for place in self.places
        }
        # The error of one rounding: smaller errors can't be distinguished. Two programs may sum in
        # other orders.
        others = [_ZERO / JUMP] if len(programs) > 1 else []
        eps = max(float(jnp.finfo(dtype).eps) for dtype in halves or {F32})
        self.floor = max(*others, _ROUNDING * eps, 0)

    def leaving(self, place: ModulePass) -> list[Measurement]:
        """Returns the values that leave a place, and gradients of parameters only if there are
        none.
        """
        found = [one for one in self.measurements if place in one.left]
        if found and place.direction == "backward":
            return found
        return found + [
            one for one in self.measurements if place in one.returned and one not in found
        ]

    def entering(self, place: ModulePass, one: Measurement, what: int = _ERROR) -> np.ndarray:
        """Returns the worst error that entered a place before a value, in each step of a scan."""
        worst = np.zeros(one.errors.shape)
        for other in self._entered.get(place, ()):
            if other.key < one.key:
                found = other.numbers[..., what]
                same_steps = found.shape == worst.shape
                worst = np.maximum(worst, found if same_steps else found.max(initial=0))
        return worst

    def jumps(self, place: ModulePass, one: Measurement) -> np.ndarray:
        """Returns the steps in which a value's error is made at the place itself.

        Independent errors of the roundings inside of a place add up in squares.

        A gradient that is zero except for rounding, such as that of a bias before a normalization,
        has no meaningful error.
        """
        count = sum(steps for key, steps in self._made.get(place, ()) if key <= one.key)
        noise = self.floor * math.sqrt(max(count, 1))
        jumps = one.errors > JUMP * np.maximum(self.entering(place, one), noise)
        if place.direction == "backward":
            entered = self.entering(place, one, _REFERENCE)
            is_zero = one.numbers[..., _REFERENCE] < _ZERO * entered
            is_lost = ~np.isfinite(one.errors) | (one.numbers[..., _UNDERFLOW] > 0.5)
            jumps &= ~is_zero | is_lost
        return jumps

    def first_error(self, place: ModulePass) -> Measurement | None:
        """Returns the first value in a place whose error is made there, or None."""
        for one in self.measurements:
            if _is_made_in(one, place) and self.jumps(place, one).any():
                return one
        return None

    def first_jump(self) -> tuple[ModulePass | None, int | None]:
        """Returns the first place with a jump, the innermost if nested, and its scan's step."""
        found: list[tuple[Measurement, ModulePass, int | None]] = []
        for one in self.measurements:
            # the later of two values in one loop may go wrong in an earlier step
            if found and not (found[0][0].errors.ndim and found[0][0].bodies[:1] == one.bodies[:1]):
                break
            forward = (place for place in one.returned if place.direction == "forward")
            for place in sorted((*one.left, *forward), key=lambda place: -len(place.path)):
                jumps = self.jumps(place, one)
                if jumps.any():
                    found.append((one, place, _first(jumps, place)))
                    break
        # a backward pass runs through the steps in reverse
        turn = lambda item: (item[2] or 0) * (-1 if item[1].direction == "backward" else 1)  # noqa: E731
        _, place, step = min(found, key=turn, default=(None, None, None))
        return place, step


def _is_made_in(one: Measurement, place: ModulePass) -> bool:
    """Returns whether a value is computed in a place, in its pass."""
    is_inside = one.made.path[: len(place.path)] == place.path
    return is_inside and one.made.direction == place.direction


def _enters(one: Measurement, place: ModulePass) -> bool:
    """Returns whether a value enters a place; backward reads the module's activations, too."""
    forward = place._replace(direction="forward")
    return place in one.entered or (
        place.direction == "backward" and (forward in one.entered or forward in one.left)
    )


def _with_prefixes(places: Iterable[ModulePass]) -> dict[ModulePass, None]:
    """Returns places after those around them, outermost first."""
    return {
        ModulePass(path[:n], direction): None
        for path, direction in places
        for n in range(1 if path else 0, len(path) + 1)
    }


def _first(jumps: np.ndarray, place: ModulePass) -> int | None:
    """Returns the first step of the outermost scan with a jump; None outside of any."""
    if not jumps.ndim:
        return None
    steps = np.flatnonzero(jumps.reshape(jumps.shape[0], -1).any(1))
    return int(steps[-1] if place.direction == "backward" else steps[0])


def _codes(log: Log, notes: dict[int, Any]) -> Iterable[OperandCodes]:
    """Returns the operands of matmuls in 8 bits, one for each module and side."""
    lost = lost_prefixes(place.path for place in _with_prefixes(log.places))
    found: dict[tuple[str, CodedSide, str], np.ndarray] = {}
    for i, (of, dtype) in enumerate(log.codes):
        if -1 - i not in notes:
            continue
        numbers = np.asarray(notes[-1 - i], np.float64).reshape(-1, 2).max(0)
        for path in of.paths:
            key = spelled(lost.get(path, path)), of.operand, str(np.dtype(dtype))
            found[key] = np.maximum(found[key], numbers) if key in found else numbers
    for (path, operand, dtype), (saturated, underflow) in found.items():
        yield OperandCodes(path, operand, dtype, float(saturated), float(underflow))


def _rows(program: Program, findings: Findings) -> Iterable[Row]:
    for place in findings.places:
        if leaving := findings.leaving(place):
            kind = "gradient" if place.direction == "backward" else "activation"
            yield _row(spelled(place.path), kind, leaving, findings, place)
    names = (*program.outputs, *program.gradients)
    for one in findings.measurements:
        if one.output is not None:
            kind = "output" if one.output < len(program.outputs) else "parameter"
            yield _row(names[one.output], kind, [one], findings)


def _row(
    path: str,
    kind: RowKind,
    leaving: Sequence[Measurement],
    findings: Findings,
    place: ModulePass | None = None,
) -> Row:
    worst = np.max([one.worst for one in leaving], axis=0)
    nearest = max(leaving, key=lambda one: (not is_discrete(one.dtype), one.headroom))
    culprit = max(leaving, key=lambda one: float(one.worst[_ERROR]))
    entering, is_jump = 0.0, False
    if place is not None:
        culprit = findings.first_error(place) or culprit
        entering = max(float(findings.entering(place, one).max(initial=0)) for one in leaving)
        is_jump = any(bool(findings.jumps(place, one).any()) for one in leaving)
    shape = max((one.errors.shape for one in leaving), key=len)
    steps = np.max([one.errors for one in leaving if one.errors.shape == shape], axis=0)
    figures: dict[str, float] = dict(zip(NAMES, map(float, worst), strict=True))
    figures["cosine"] = 1 - figures.pop("distance")
    figures["largest"] = float(nearest.worst[_LARGEST])
    return Row(
        path=path,
        kind=kind,
        limit=limit_of(nearest.dtype),
        dtype=str(np.dtype(nearest.dtype)),
        entering=entering,
        steps=_nested(steps.tolist()) if shape else (),
        primitive=culprit.primitive,
        source=culprit.source,
        is_jump=is_jump,
        **figures,
    )


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def _notes(
    found: Beside, recordings: Sequence[Recording], of: tuple[str, str], rows: Sequence[Row]
) -> Iterable[str]:
    program, against = recordings[0].program, of[1] or "float32"
    if not of[1]:
        yield from _notes_on_float32(program)
    for name, places in zip(of, found.alone, strict=True):
        paths = list(dict.fromkeys(repr(spelled(place.path)) for place in places))
        if paths:
            more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
            yield f"Without a counterpart, in {name} alone: {', '.join(paths[:_LISTED])}{more}."
    if inputs := dict.fromkeys(name for one in recordings for name in one.inputs_with_nan):
        yield f"NaN in the inputs: {', '.join(inputs)}. Values that depend on it can't be compared."
    undefined = [row.path for row in rows if row.undefined and row.kind == "activation"]
    if undefined:
        yield (
            f"{against} itself is infinite or NaN in {len(undefined)} rows; the first is "
            f"{undefined[0]!r}."
        )
    gradients = [row for row in rows if row.kind == "parameter"]
    least = _ZERO * max((row.reference_largest for row in gradients), default=0.0)
    zero = [row.path for row in gradients if row.error > 1 and row.reference_largest < least]
    if zero:
        yield (
            f"These gradients are zero up to rounding in {against} too, so their errors mean "
            f"nothing: {', '.join(zero)}."
        )
    missing = len(program.outputs) - sum(row.kind == "output" for row in rows)
    if not rows:
        yield "Nothing was measured: neither a module nor the function returns numbers."
    elif not any(row.error or row.undefined for row in rows) and missing:
        yield f"No measured value differs from {against}; {missing} outputs were not measured."
    elif not any(row.error or row.undefined for row in rows):
        reason = "" if of[1] else ": the policy changes nothing here"
        yield f"Nothing differs from {against}{reason}."


def _notes_on_float32(program: Program) -> Iterable[str]:
    unpaired = dict.fromkeys(map(spelled, program.reference.unpaired))
    if program.rejected:
        yield (
            f"The function can't be traced in float32 ({program.rejected}). The reference is the "
            "same program with wider dtypes, whose constants keep their rounding to half precision."
        )
    elif unpaired:
        yield (
            f"Constants have no counterpart in float32 at {', '.join(map(repr, unpaired))}. They "
            "keep their rounding to half precision in the reference."
        )
    if note := program.note_on_draws():
        yield note

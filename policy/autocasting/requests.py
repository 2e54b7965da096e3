"""Requests of an author's lines: casts of operands to float32, float32 results of matmuls.

A trace in float32 shows neither, since JAX leaves out a cast that changes nothing. Where the source
of an operation speaks of dtypes, its function is traced once more, abstractly and in compute_dtype.
Operations of both traces stand in one order; those of the first are marked with what was said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from policy.autocasting.cast_flow import (
    CAST,
    DERIVED,
    GIVEN,
    HALF,
    NARROW,
    RECEIVED,
    REDUCED,
    Operations,
    rule_of,
    speaks_backward,
    with_marks,
)
from policy.autocasting.source_lines import (
    asks_for_float32,
    class_of,
    frames,
    gives_float32,
    is_by_caster,
    is_layers,
    line_of,
    multiplies_for_linear_algebra,
    normalization_of,
    speaks,
    with_nested,
    writers,
)
from policy.core.messages import warn_once
from policy.core.scope import Scope, current_scope, enter
from policy.programs import marks
from policy.programs.dtypes import F32, float_dtype, is_half
from policy.programs.jaxprs import Equation, bind
from policy.programs.thread import during, thread


def with_requests(
    jaxpr: Any,
    again: Callable[[], Any],
    half: np.dtype,
    *,
    is_rule: bool = False,
    of_casts: bool = False,
) -> Any:
    """Returns a closed jaxpr, traced in float32, whose matmuls are marked with what lines say.

    Warns of lines that cast operands to float32 and leave open whether the matmul is to be one.

    Args:
      jaxpr: the program.
      again: traces its function in compute_dtype.
      half: compute_dtype.
      is_rule: whether it is a derivative rule, which is traced again whatever its source says.
      of_casts: whether the rule belongs to a function that casts the operands of its matmuls.
    """
    if not is_half(half) or thread.traced_dtype is not None or thread.is_summary:
        return jaxpr
    first = Operations(jaxpr)
    kept = dict.fromkeys(map(id, first.kept), marks.UNROUNDED)
    is_asked = is_rule or speaks([*first, *first.calls])
    is_asked = is_asked or any(map(speaks_backward, first.with_rules))
    lines = itertools.chain(first.layers, (line for _, line, _ in first.elementwise))
    is_asked = is_asked or any(map(is_by_caster, lines))
    said = kept | (_said(first, again, half, of_casts) if is_asked else {})
    return with_marks(jaxpr, said, {}) if said else jaxpr


def with_requests_of_rule(
    rule: Any, equation: Equation, half: np.dtype, again: Callable[[Equation], Any] | None = None
) -> Any:
    """Returns a program of a derivative rule with its matmuls marked as `with_requests` does.

    Args:
      rule: the closed jaxpr, traced in float32.
      equation: the one of the function that has the rule.
      half: compute_dtype.
      again: returns the rule's program for the equation of the second trace; None of the backward
        rule of a `jax.custom_vjp`, which that trace has kept.
    """
    second, of_casts = _second.get(rule_of(equation), (None, False))
    if second is None or (again is None and rule_of(second) not in _backward):
        return rule
    trace = again or (lambda second: _backward[rule_of(second)])
    return with_requests(rule, lambda: trace(second), half, is_rule=True, of_casts=of_casts)


_second: weakref.WeakKeyDictionary[Any, tuple[Equation, bool]] = weakref.WeakKeyDictionary()
"""Equations of second traces, and whether they cast, by the derivative rules of those of the first.
"""

_backward: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Programs of backward rules in second traces, by the forward rules."""


def retracing(scope: Scope, half: np.dtype) -> Scope:
    """Returns a scope for the second trace: programs of either trace are kept apart."""
    return dataclasses.replace(scope, options=("second trace", half, scope.options))


def _trace_rule(equation: Equation) -> None:
    """Traces the derivative rule of an equation, which JAX keeps.

    While a program is differentiated, JAX gives the equations of a rule the traceback of its call.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    places = [i for i, aval in enumerate(avals) if float_dtype(aval) is not None]

    def differentiated(*arrays: Any) -> Any:
        def function(*floats: Any) -> Any:
            given = dict(zip(places, floats, strict=True))
            return bind(equation, [given.get(i, array) for i, array in enumerate(arrays)])

        outputs, pullback = jax.vjp(function, *(arrays[i] for i in places))
        return jax.tree.leaves(pullback), outputs

    with (
        contextlib.suppress(Exception),
        enter(retracing(current_scope(), np.dtype(thread.traced_dtype))),
    ):
        saved, outputs = jax.eval_shape(differentiated, *avals)
        if (backward := equation.params.get("bwd")) is not None:
            traced = jax.make_jaxpr(backward.call_wrapped)(*saved, *outputs)
            _backward[rule_of(equation)] = traced


def _said(
    first: Operations, again: Callable[[], Any], half: np.dtype, of_casts: bool
) -> dict[int, str]:
    """Returns the marks of equations by their identities, and warns of open matmuls."""
    settings = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    try:
        with settings[0], settings[1], during(traced_dtype=half), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = Operations(again(), of_casts=of_casts)
            for equation in second.with_rules:
                _trace_rule(equation)
    except Exception as error:  # code for float32 alone
        _tell_unseen(
            [*first, *first.calls], half, f"{type(error).__name__}: {error}".splitlines()[0]
        )
        return {}
    shapes = [[tuple(v.aval.shape for v in e.invars) for e in found] for found in (first, second)]
    if shapes[0] != shapes[1]:
        _tell_unseen([*first, *first.calls], half, "it runs other matmuls there")
        return {}
    if len(first.with_rules) == len(second.with_rules):
        for old, new in zip(first.with_rules, second.with_rules, strict=True):
            _second[rule_of(old)] = new, id(new) in second.casting
    casting = {each for code in second.casts for each in with_nested(code)}
    said: dict[int, str] = {}
    for equation, same, line, operands in zip(
        first, second, second.lines, second.operands, strict=True
    ):
        request = _request(same, operands[:2])
        is_open = CAST not in operands and set(operands) != {DERIVED}
        if request == "told" and is_open and not casting & writers(line):
            request = ""  # computed from a cast that another function wrote
        if request == "told" or said.get(id(equation), request) != request:
            _tell(line, half)
            request = ""
        said[id(equation)] = request
    if [HALF, HALF] in second.operands:
        pairs = zip(second, second.operands, strict=True)
        _tell_layers((line for line, given in pairs if given[:2] == [GIVEN, GIVEN]), half)
    for line in second.normalizations:
        _tell_normalization(line)
    for line in second.of_layers:
        _tell_input(line, half)
    said |= _said_elementwise(first, second)
    return {number: mark for number, mark in said.items() if mark}


def _request(equation: Equation, operands: Sequence[str]) -> str:
    """Returns the mark of a matmul, "" of a line that says nothing, or "told" of an open one."""
    if equation.params.get("precision") is not None and multiplies_for_linear_algebra(equation):
        return ""
    found, is_wide = set(operands), not NARROW.intersection(operands)
    asked = equation.params.get("preferred_element_type")
    if found == {HALF} and asked is not None and np.dtype(asked) == F32:
        return marks.UNROUNDED
    if (CAST in found and is_wide) or found == {RECEIVED}:
        return marks.operation_in_float32()
    both = found <= {DERIVED, REDUCED}
    return "told" if CAST in found or DERIVED in found or both else ""


def _said_elementwise(first: Operations, second: Operations) -> dict[int, str]:
    """Returns the marks of sums, products and bounded functions of operands that lines cast to
    float32. A program that several calls run is marked if all of them ask for it.
    """
    kinds = [
        [(each.primitive, each.outvars[0].aval.shape) for each, *_ in trace.elementwise]
        for trace in (first, second)
    ]
    if kinds[0] != kinds[1]:
        return {}
    numbers = [id(each) for each, *_ in first.elementwise]
    is_asked = [asks for *_, asks in second.elementwise]
    others = set(itertools.compress(numbers, map(operator.not_, is_asked)))
    return dict.fromkeys(set(numbers) - others, marks.operation_in_float32())


def _tell(equation: Equation, half: np.dtype) -> None:
    function, line = line_of(equation)
    warn_once(
        f"{function}, at {line}, multiplies a value that was cast to float32, and the policy runs "
        f"that matmul in {half}. For float32, cast both operands where they are multiplied, or "
        f"write `with full_precision():` around it; for {half}, leave out the cast."
    )


def _tell_unseen(lines: Iterable[Equation], half: np.dtype, reason: str) -> None:
    for function, line in {
        line_of(line) for line in lines if any(map(asks_for_float32, writers(line)))
    }:
        warn_once(
            f"{function}, at {line}, names float32, and can't be traced in {half} to see "
            f"what it holds for ({reason}). Its matmuls run in {half}: write "
            "`with full_precision():` around those that should run in float32."
        )


def _tell_layers(lines: Iterable[Equation], half: np.dtype) -> None:
    for line in lines:
        layer = [code for code in frames(line)[0] if is_layers(code.co_filename)][-1]
        if layer.co_qualname == "Embed.attend" and "nnx" in layer.co_filename:
            continue  # whose dtype is that of its table
        if not all(gives_float32(code.co_filename) for code in writers(line)):
            continue  # the dtype of the whole model, which the policy replaces
        warn_once(
            f"{class_of(layer)}, called at {line_of(line)[1]}, has dtype=float32, which other "
            f"matmuls have not, and the policy runs all of them in {half}. For float32, call it "
            "in `with full_precision():`, or give a rule for it, such as {'head': 'float32'}; for "
            f"{half}, leave out its dtype."
        )


def _tell_input(line: Equation, half: np.dtype) -> None:
    warn_once(
        f"A layer, called at {line_of(line)[1]}, is given a value cast to float32, and the "
        f"policy runs its matmul in {half}. For float32, call it in `with full_precision():`, or "
        f"give a rule for it, such as {{'head': 'float32'}}; for {half}, leave out the cast."
    )


def _tell_normalization(line: Equation) -> None:
    warn_once(
        f"{normalization_of(line)}, called at {line_of(line)[1]}, has "
        "force_float32_reductions=False, and the policy computes its statistics in float32: leave "
        "that argument out."
    )

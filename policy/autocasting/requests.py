"""Requests of an author's lines about matmuls: casts of operands to float32, float32 results.

A trace in float32 shows neither, since JAX leaves out a cast that changes nothing. Where the source
of a matmul speaks of dtypes, its function is traced once more, abstractly and in compute_dtype.
Matmuls of both traces stand in one order; those of the first are marked with what was said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from policy.core.messages import warn_once
from policy.core.scope import Scope, current_scope, enter
from policy.programs import marks, primitives
from policy.programs.dtypes import F32, float_dtype, is_half
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    bind,
    equations_of,
    opened,
    programs_of,
    runs_any,
    subprograms,
    with_subprograms,
)
from policy.programs.thread import during, thread

_SPEAKS = re.compile("astype|asarray|float32|f32|preferred_element_type|convert_element_type")
_GIVES = re.compile(r"preferred_element_type|\bdtype\b.*(float32|f32)|force_float32_reductions")
_FLOAT32 = re.compile("float32|f32", re.IGNORECASE)
_CASTS = {"astype", "_astype", "meth", "array", "asarray", "__call__", "convert_element_type"}
_PLUMBING = re.compile(
    "_convert_element_type|bind|process_primitive|current|cache_miss|reraise|jvp|<genexpr>"
)
_LAYERS = ("linear.py", "attention.py", "recurrent.py")
_TREES = re.compile(r"jax._src.tree(_util)?\.py$")
_SUMS = re.compile("reduce|cum|arg|sort")
_ELEMENTWISE = primitives.PRODUCTS | primitives.FORWARD_ADDITIONS | {"tanh", "logistic"}

# The operands of a matmul in the second trace: compute_dtype, the same as JAX promoted it, cast by
# a line that names float32, computed from such values elementwise or with a sum, and others.
_HALF, _PROMOTED, _CAST, _GIVEN = "half", "promoted", "cast", "given"
_DERIVED, _REDUCED, _OTHER = "derived", "reduced", "other"
_NARROW = {_HALF, _PROMOTED, _GIVEN}


def with_requests(
    jaxpr: Any, again: Callable[[], Any], half: np.dtype, *, is_asked: bool = False
) -> Any:
    """Returns a closed jaxpr, traced in float32, whose matmuls are marked with what lines say.

    Warns of lines that cast operands to float32 and leave open whether the matmul is to be one.

    Args:
      jaxpr: the program.
      again: traces its function in compute_dtype.
      half: compute_dtype.
      is_asked: traces it again whatever the source of its matmuls says.
    """
    if not is_half(half) or thread.traced_dtype is not None or thread.is_summary:
        return jaxpr
    first = _Lines()
    body, _ = opened(jaxpr)
    kept = dict.fromkeys(map(id, _matmuls_and_kept(body, first)), marks.UNROUNDED)
    is_asked = is_asked or _speaks(first) or any(map(_is_by_caster, _elementwise_of(body)))
    said = kept | (_said(jaxpr, first, again, half) if is_asked else {})
    return _marked(jaxpr, said, {}) if said else jaxpr


def with_requests_of_rule(
    rule: Any, equation: Equation, again: Callable[[Equation], Any], half: np.dtype
) -> Any:
    """Returns a program of a derivative rule with its matmuls marked as `with_requests` does.

    Args:
      rule: the closed jaxpr, traced in float32.
      equation: the one of the function that has the rule.
      again: returns the rule's program for the equation of the second trace.
      half: compute_dtype.
    """
    second = _second.get(_rule_of(equation))
    if second is None:
        return rule
    return with_requests(rule, lambda: again(second), half, is_asked=True)


_second: weakref.WeakKeyDictionary[Any, Equation] = weakref.WeakKeyDictionary()
"""Equations of second traces, by the derivative rules of those of the first."""


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

        return jax.vjp(function, *(arrays[i] for i in places))[0]

    with (
        contextlib.suppress(Exception),
        enter(retracing(current_scope(), np.dtype(thread.traced_dtype))),
    ):
        jax.eval_shape(differentiated, *avals)


def _rule_of(equation: Equation) -> Any:
    """Returns the function that traces the derivative rule of an equation, or None."""
    params = equation.params
    rule = params.get("jvp_jaxpr_fun") or params.get("fwd_jaxpr_thunk")
    return getattr(rule, "f", rule)


class _Lines(list[Equation]):
    """The matmuls of a program in the order of their calls, but for those of layers.

    Attributes:
      with_rules: the equations of functions with derivative rules of their own and matmuls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.with_rules: list[Equation] = []

    def note(self, equation: Equation) -> None:
        """Adds an equation that is a matmul, or has derivative rules."""
        if equation.primitive.name in primitives.MATMULS:
            self.append(equation)
        elif _rule_of(equation) is not None and any(
            runs_any(program, primitives.MATMULS) for program in programs_of(equation)
        ):
            self.with_rules.append(equation)


def _said(jaxpr: Any, first: _Lines, again: Callable[[], Any], half: np.dtype) -> dict[int, str]:
    """Returns the marks of equations by their identities, and warns of open matmuls."""
    settings = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    try:
        with settings[0], settings[1], during(traced_dtype=half), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = _Matmuls(again())
            for equation in second.with_rules:
                _trace_rule(equation)
    except Exception:  # code for float32 alone
        return {}
    shapes = [[tuple(v.aval.shape for v in e.invars) for e in found] for found in (first, second)]
    if shapes[0] != shapes[1]:
        return {}
    if len(first.with_rules) == len(second.with_rules):
        _second.update(zip(map(_rule_of, first.with_rules), second.with_rules, strict=True))
    said: dict[int, str] = {}
    for equation, line, operands in zip(first, second, second.operands, strict=True):
        request = _request(line, operands[:2])
        if request == "told" and _CAST not in operands and not second.casts & _writers(line):
            request = ""  # computed from a cast that another function wrote
        if request == "told" or said.get(id(equation), request) != request:
            _tell(line, half)
            request = ""
        said[id(equation)] = request
    if [_HALF, _HALF] in second.operands:
        pairs = zip(second, second.operands, strict=True)
        _tell_layers((line for line, given in pairs if given[:2] == [_GIVEN, _GIVEN]), half)
    for line in second.normalizations:
        _tell_normalization(line)
    said |= _said_elementwise(jaxpr, second)
    return {number: mark for number, mark in said.items() if mark}


def _said_elementwise(jaxpr: Any, second: _Matmuls) -> dict[int, str]:
    """Returns the marks of sums, products and bounded functions of operands that lines cast to
    float32. A program that several calls run is marked if all of them ask for it.
    """
    found, is_asked = zip(*second.elementwise, strict=True) if second.elementwise else ((), ())
    first = list(_elementwise_of(opened(jaxpr)[0])) if any(is_asked) else []
    if list(map(_kind, first)) != list(map(_kind, found)):
        return {}
    others = {id(each) for each, asks in zip(first, is_asked, strict=True) if not asks}
    return {id(each): marks.in_float32() for each in first if id(each) not in others}


def _kind(equation: Equation) -> Any:
    return equation.primitive, equation.outvars[0].aval.shape


def _elementwise_of(body: OpenJaxpr) -> Iterator[Equation]:
    """Yields the elementwise equations of a program, in the order of `_Matmuls`."""
    for equation in equations_of(body):
        if _is_of_layer(equation):
            continue
        if equation.primitive.name in _ELEMENTWISE and _of(equation.outvars[0].aval):
            yield equation
        for one in subprograms(equation):
            if one.is_run and one.operands is not None:
                yield from _elementwise_of(one.body)


def _matmuls_and_kept(body: OpenJaxpr, found: _Lines) -> list[Equation]:
    """Adds the matmuls of a program to `found`, and returns those that make results of modules
    whose own policy returns them unrounded.
    """
    atoms, kept = [], []
    for equation in equations_of(body):
        if equation.primitive.name in primitives.CASTS:
            atoms += equation.invars if marks.mark_of(equation) == marks.KEPT else ()
        elif not _is_of_layer(equation):
            found.note(equation)
            for one in subprograms(equation):
                if one.is_run and one.operands is not None:
                    kept += _matmuls_and_kept(one.body, found)
    return [*kept, *_makers_of(body, atoms)] if atoms else kept


def _is_of_layer(equation: Equation) -> bool:
    stack = equation.source_info.name_stack.stack
    return any(getattr(scope, "name", None) == marks.LAYER for scope in stack)


def _makers_of(body: OpenJaxpr, atoms: list[Any]) -> Iterator[Equation]:
    """Yields the matmuls that some values are made by, up to elementwise operations and moves."""
    makers = {
        variable: equation for equation in equations_of(body) for variable in equation.outvars
    }
    seen: set[int] = set()
    while atoms:
        atom = atoms.pop()
        equation = None if isinstance(atom, jex_core.Literal) else makers.get(atom)
        if equation is None or id(equation) in seen or marks.mark_of(equation) is not None:
            continue
        seen.add(id(equation))
        if equation.primitive.name in primitives.MATMULS:
            yield equation
        elif equation.primitive.name in primitives.ELEMENTWISE | primitives.MOVES_DATA:
            atoms += equation.invars


def retracing(scope: Scope, half: np.dtype) -> Scope:
    """Returns a scope for the second trace: programs of either trace are kept apart."""
    return dataclasses.replace(scope, options=("second trace", half, scope.options))


def _request(equation: Equation, operands: Sequence[str]) -> str:
    """Returns the mark of a matmul, "" of a line that says nothing, or "told" of an open one."""
    found, is_wide = set(operands), not _NARROW.intersection(operands)
    asked = equation.params.get("preferred_element_type")
    if found == {_HALF} and asked is not None and np.dtype(asked) == F32:
        return marks.UNROUNDED
    if _CAST in found and is_wide:
        return marks.in_float32()
    both = found <= {_DERIVED, _REDUCED}
    return "told" if _CAST in found or _DERIVED in found or both else ""


class _Matmuls(_Lines):
    """The matmuls of a second trace.

    Attributes:
      operands: what their operands are.
      casts: the code of functions that cast to float32.
      elementwise: the elementwise equations, and whether lines cast all of their operands.
      normalizations: squares of Flax's normalizations in compute_dtype.
    """

    def __init__(self, jaxpr: Any):
        super().__init__()
        self.elementwise: list[tuple[Equation, bool]] = []
        self.normalizations: list[Equation] = []
        self.operands: list[list[str]] = []
        self.casts: set[Any] = set()
        body, _ = opened(jaxpr)
        self.run(body, [_of(v.aval) for v in body.invars])

    def run(self, body: OpenJaxpr, given: Sequence[str]) -> list[str]:
        """Notes the matmuls of a program, and returns what its outputs are."""
        facts = {v: _of(v.aval) for v in body.constvars} | dict(
            zip(body.invars, given, strict=True)
        )

        def read(atom: Any) -> str:
            return "" if isinstance(atom, jex_core.Literal) else facts[atom]

        for equation in equations_of(body):
            results = self._results(equation, list(map(read, equation.invars)))
            facts.update(zip(equation.outvars, results, strict=True))
        return list(map(read, body.outvars))

    def _results(self, equation: Equation, values: list[str]) -> list[str]:
        results = [_of(v.aval) for v in equation.outvars]
        name = equation.primitive.name
        if _is_of_layer(equation):
            return results
        self.note(equation)
        inside = subprograms(equation)
        for one in inside:
            if one.is_run and one.operands is not None:
                made = self.run(one.body, one.given(values))
                results = made if len(made) == len(results) else results
        if inside:
            return results
        if name in primitives.MATMULS:
            self.operands.append(values)
            return results
        if name in _ELEMENTWISE and results[0]:
            self.elementwise.append((equation, set(_scaled(equation, values)) == {_CAST}))
        if name in ("square", "integer_pow") and results == [_HALF] and _normalization_of(equation):
            self.normalizations.append(equation)
        if results != [_OTHER] or marks.mark_of(equation) is not None:
            return results
        result = _of_float32(equation, values)
        if result == _CAST:
            self.casts |= _writers(equation)
        return [result]


def _of(aval: Any) -> str:
    dtype = float_dtype(aval)
    return "" if dtype is None else _HALF if is_half(dtype) else _OTHER


def _of_float32(equation: Equation, values: list[str]) -> str:
    """Returns what a float32 result of an equation is."""
    name, floats = equation.primitive.name, [value for value in values if value]
    if name == "convert_element_type" and floats == [_HALF]:
        return _cast_by(equation)
    if len(set(floats)) == 1 and (name in primitives.MOVES_DATA | primitives.BROADCASTS):
        return floats[0]
    if name in primitives.PRODUCTS and _scaled(equation, values) == [_CAST]:
        return _CAST  # by a number
    if {_CAST, _DERIVED, _REDUCED}.intersection(floats):
        return _REDUCED if _REDUCED in floats or _SUMS.match(name) else _DERIVED
    return _OTHER


def _scaled(equation: Equation, values: Sequence[str]) -> list[str]:
    """Returns what the operands of an equation are that are no numbers."""
    pairs = zip(values, equation.invars, strict=True)
    return [value for value, atom in pairs if value and getattr(atom.aval, "shape", ())]


def _cast_by(equation: Equation) -> str:
    """Returns whether a line that names float32 widened an operand, or another, or JAX.

    A dtype that is a field of a model, ``x.astype(self.dtype)``, or an argument of Flax's layers
    is left to the policy.
    """
    names: set[str] = set()
    for code, offset in zip(*_frames(equation), strict=True):
        file, name = code.co_filename, code.co_name
        if not file.startswith(_JAX):
            is_cast = bool(names & _CASTS) and not names - _CASTS and not _is_library(file)
            if _is_flax(file):
                return _GIVEN
            return _CAST if is_cast and _names_float32(code, offset) else _PROMOTED
        if not _PLUMBING.search(name) and not _TREES.search(file):
            names.add(name)
    return _PROMOTED


def _names_float32(code: types.CodeType, offset: int) -> bool:
    """Returns whether the source of a call says float32, or a function of it, `promote_types`."""
    place = next(itertools.islice(code.co_positions(), offset // 2, None), (None,) * 4)
    lines = linecache.getlines(code.co_filename)
    if None in place or not lines:
        return True
    first, last, start, end = (int(each or 0) for each in place)
    text = "".join(lines[first - 1 : last]).encode()
    text = text[start : len(text) - len(lines[last - 1].encode()) + end].decode(errors="ignore")
    is_local = re.search(r"[(,]\s*(dtype=)?\w+\)$", text) is not None
    return bool(_FLOAT32.search(text)) or (is_local and "promote_types" in code.co_names)


def is_of_jax(equation: Equation) -> bool:
    """Returns whether JAX put in a cast, for operands of two dtypes, and no line asks for it."""
    names: set[str] = set()
    for code in _frames(equation)[0]:
        if not code.co_filename.startswith(_JAX):
            break
        if not _PLUMBING.search(code.co_name):
            names.add(code.co_name)
    return not names & _CASTS or bool(names - _CASTS)


def _marked(jaxpr: Any, said: dict[int, str], done: dict[int, Any]) -> Any:
    """Returns a program whose matmuls carry the marks of `said`, by their identities."""
    body: Any = opened(jaxpr)[0]
    if id(body) in done:
        return done[id(body)]
    equations = []
    for equation in equations_of(body):
        each: Any = equation
        inside = subprograms(each)
        if inside:
            programs = [_marked(one.jaxpr, said, done) for one in inside]
            if any(new is not one.jaxpr for new, one in zip(programs, inside, strict=True)):
                each = each.replace(params=with_subprograms(each, programs))
        if mark := said.get(id(equation)):
            info = each.source_info
            stack = info.name_stack.extend(mark)
            each = each.replace(source_info=info.replace(name_stack=stack))
        equations.append(each)
    if all(map(lambda new, old: new is old, equations, equations_of(body))):
        result = jaxpr
    else:
        result = body.replace(eqns=equations)
        result = result if jaxpr is body else jaxpr.replace(jaxpr=result)
    done[id(body)] = result
    return result


# --------------------------------------------------------------------------------------------------
# Lines of source
# --------------------------------------------------------------------------------------------------

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_TRACES = tuple(
    os.path.join(_HERE, *path)
    for path in (
        ("programs", "tracing", "pure_calls.py"),
        ("autocasting", "transform.py"),
        ("autocasting", "derivative_rules.py"),
    )
)
_OURS = tuple(os.path.join(os.path.dirname(_HERE), name, "") for name in ("policy", "mpmodules"))


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith((_JAX, *_OURS)) or _is_flax(file)


@functools.cache
def _is_flax(file: str) -> bool:
    flax = getattr(sys.modules.get("flax"), "__file__", None)
    return flax is not None and file.startswith(os.path.dirname(os.path.abspath(flax)) + os.sep)


def _is_layers(file: str) -> bool:
    """Returns whether a file has layers of Flax's that multiply."""
    return _is_flax(file) and os.path.basename(file) in _LAYERS


def _frames(equation: Equation) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns the code and the offset in it of each frame of an equation, the innermost first."""
    traceback: Any = equation.source_info.traceback
    return traceback.raw_frames() if traceback is not None else ((), ())


def _writers(equation: Equation) -> set[Any]:
    """Returns the code of the innermost function that is no library's."""
    own = (code for code in _frames(equation)[0] if not _is_library(code.co_filename))
    return set(itertools.islice(own, 1))


def _speaks(equations: Sequence[Equation]) -> bool:
    """Returns whether a function that runs a matmul, or one that it calls, names a cast.

    A layer of Flax's may have been given a preferred_element_type anywhere in the file that calls
    it.
    """
    inside = {code for equation in equations for code in _inside(equation)}
    files = {code.co_filename for code in inside}
    if any(map(_is_layers, files)) and any(map(_gives_dtypes, files)):
        return True
    own = {code for code in inside if not _is_flax(code.co_filename)}
    around = [each for code in own for each in _with_nested(code)]
    called = {
        found
        for code in around
        for name in (*code.co_names, *code.co_freevars)
        for found in _functions_of(code.co_filename).get(name, ())
    }
    codes = (*around, *(each for code in called - own for each in _with_nested(code)))
    return any(
        _SPEAKS.search(said)
        for code in codes
        for said in (*code.co_names, *(str(each) for each in code.co_consts if _is_text(each)))
    )


def _is_by_caster(equation: Equation) -> bool:
    """Returns whether the function that runs an equation casts to float32, or tells a
    normalization of Flax's how to compute.
    """
    is_normalization = _normalization_of(equation) is not None
    return any(
        _casts_to_float32(code) or (is_normalization and _gives_dtypes(code.co_filename))
        for code in _writers(equation)
    )


def _normalization_of(equation: Equation) -> str | None:
    """Returns the class of Flax's normalization whose statistics an equation computes, or None."""
    codes = _frames(equation)[0]
    names = [code.co_name for code in codes if _is_flax(code.co_filename)]
    if "_compute_stats" not in names[:2]:
        return None
    return next((_class_of(code) for code in codes if code.co_name == "__call__"), None)


def _class_of(code: types.CodeType) -> str:
    return code.co_qualname.split(".")[0]


@functools.lru_cache(4096)
def _casts_to_float32(code: types.CodeType) -> bool:
    names = " ".join(code.co_names)
    return bool(_SPEAKS.search(names) and _FLOAT32.search(names))


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _with_nested(each)


@functools.lru_cache(256)
def _gives_dtypes(file: str) -> bool:
    """Returns whether a file may give layers of Flax's a dtype, or one of their results."""
    return not _is_flax(file) and bool(_GIVES.search("".join(linecache.getlines(file))))


def _is_text(constant: Any) -> bool:
    return isinstance(constant, str | tuple)  # a tuple has the names of keyword arguments


def _inside(equation: Equation) -> Iterator[Any]:
    """Yields the code of the functions around an equation, up to the call that is traced."""
    for code in _frames(equation)[0]:
        if code.co_filename.startswith(_TRACES):
            return
        if _is_flax(code.co_filename) or not _is_library(code.co_filename):
            yield code


@functools.lru_cache(256)
def _functions_of(file: str) -> dict[str, list[Any]]:
    """Returns the code of the functions that a module's file defines, or imports from its package
    or folder, by their names.
    """
    found: dict[str, list[Any]] = {}
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    held = [item for module in modules for item in vars(module).items()]
    held += [item for _, each in held if isinstance(each, type) for item in vars(each).items()]
    packages = {m.__name__.split(".")[0] for m in modules} - {"__main__"}
    near = {os.path.dirname(file), *(os.sep + package + os.sep for package in packages)}

    def is_near(other: str) -> bool:
        return not _is_library(other) and any(part in other for part in near)

    codes = []
    for name, value in held:
        if isinstance(value, functools.partial):
            text = " ".join(value.keywords)
            found.setdefault(name, []).append(compile(f"{text!r}", file, "eval"))
        elif callable(value):
            codes.append(getattr(inspect.unwrap(value), "__code__", None))
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType) and is_near(code.co_filename):
            found.setdefault(code.co_name, []).append(code)
            codes += code.co_consts
    return found


def _tell(equation: Equation, half: np.dtype) -> None:
    function, line = _place_of(equation)
    warn_once(
        f"{function}, at {line}, multiplies a value that was cast to float32, and the policy runs "
        f"that matmul in {half}. For float32, cast both operands where they are multiplied, or "
        f"write `with full_precision():` around it; for {half}, leave out the cast."
    )


def _tell_layers(lines: Iterable[Equation], half: np.dtype) -> None:
    for line in lines:
        layer = [code for code in _frames(line)[0] if _is_layers(code.co_filename)][-1]
        if layer.co_qualname == "Embed.attend" and "nnx" in layer.co_filename:
            continue  # whose dtype is that of its table
        warn_once(
            f"{_class_of(layer)}, called at {_place_of(line)[1]}, has dtype=float32, which other "
            f"matmuls have not, and the policy runs all of them in {half}. For float32, call it "
            "in `with full_precision():`, or give a rule for it, such as {'head': 'float32'}; for "
            f"{half}, leave out its dtype."
        )


def _tell_normalization(line: Equation) -> None:
    warn_once(
        f"{_normalization_of(line)}, called at {_place_of(line)[1]}, has "
        "force_float32_reductions=False, and the policy computes its statistics in float32: leave "
        "that argument out."
    )


def _place_of(equation: Equation) -> tuple[str, str]:
    """Returns the function that runs an equation, and the file, number and text of its line."""
    for code, offset in zip(*_frames(equation), strict=True):
        if not _is_library(code.co_filename):
            line = equation.source_info.traceback.code_addr2line(code, offset)
            text = linecache.getline(code.co_filename, line).strip()
            return code.co_qualname, f"{os.path.basename(code.co_filename)}:{line} (`{text}`)"
    return "a function", "an unknown line"

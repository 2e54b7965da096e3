"""What an author's lines say of matmuls: casts of operands to float32, and float32 results.

A trace in float32 shows neither, since JAX leaves out a cast that changes nothing. Where the source
of a matmul speaks of dtypes, its function is traced once more, abstractly and in compute_dtype.
Matmuls of both traces stand in one order; those of the first are marked with what was said.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from policy.core.messages import warn_once
from policy.core.scope import Scope
from policy.programs import marks, primitives
from policy.programs.dtypes import F32, float_dtype, is_half
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    equations_of,
    opened,
    subprograms,
    with_subprograms,
)
from policy.programs.thread import during, thread

_SPEAKS = re.compile(r"astype|asarray|float32|preferred_element_type|convert_element_type")
_CASTS = {"astype", "_astype", "meth", "array", "asarray", "__call__", "convert_element_type"}
_PLUMBING = re.compile(r"_convert_element_type|bind|process_primitive|current|cache_miss|reraise")
_TREES = re.compile(r"jax._src.tree(_util)?\.py$")
_SUMS = re.compile("reduce|cum|arg|sort")

# The operands of a matmul in the second trace: compute_dtype, the same as JAX promoted it, cast to
# float32 by a line or by Flax, computed from such values elementwise or with a sum, and others.
_HALF, _PROMOTED, _CAST, _FLAX, _DERIVED, _REDUCED, _OTHER = [
    "half",
    "promoted",
    "cast",
    "flax",
    "derived",
    "reduced",
    "other",
]


def with_requests(jaxpr: Any, again: Callable[[], Any], half: np.dtype) -> Any:
    """Returns a closed jaxpr, traced in float32, whose matmuls are marked with what lines say.

    Warns of lines that cast operands to float32 and leave open whether the matmul is to be one.

    Args:
      jaxpr: the program.
      again: traces its function in compute_dtype.
      half: compute_dtype.
    """
    if not is_half(half) or thread.traced_dtype is not None or thread.is_summary:
        return jaxpr
    said = dict.fromkeys(map(id, _kept_results(opened(jaxpr)[0])), marks.UNROUNDED)
    first = _Matmuls.of(jaxpr)
    if _speaks(first):
        said |= _said(first, again, half)
    return _marked(jaxpr, said, {}) if any(said.values()) else jaxpr


def _said(first: _Matmuls, again: Callable[[], Any], half: np.dtype) -> dict[int, str]:
    """Returns the marks of matmuls by their identities, and warns of open ones."""
    settings = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    try:
        with settings[0], settings[1], during(traced_dtype=half), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = _Matmuls.of(again())
    except Exception:  # code for float32 alone
        return {}
    shapes = [[tuple(v.aval.shape for v in e.invars) for e in found] for found in (first, second)]
    if shapes[0] != shapes[1]:
        return {}
    said: dict[int, str] = {}
    for equation, line, operands in zip(first, second, second.operands, strict=True):
        request = _request(line, operands[:2])
        if request == "told" or said.get(id(equation), request) != request:
            _tell(equation, half)
            request = ""
        said[id(equation)] = request
    return {number: mark for number, mark in said.items() if mark}


def _kept_results(body: OpenJaxpr) -> Iterator[Equation]:
    """Yields the matmuls that make results of modules whose own policy returns them unrounded."""
    makers = {
        variable: equation for equation in equations_of(body) for variable in equation.outvars
    }
    seen: set[int] = set()
    atoms = [e.invars[0] for e in equations_of(body) if marks.mark_of(e) == marks.KEPT]
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
    for equation in equations_of(body):
        for one in subprograms(equation):
            yield from _kept_results(one.body)


def retracing(scope: Scope, half: np.dtype) -> Scope:
    """Returns a scope for the second trace: programs of either trace are kept apart."""
    return dataclasses.replace(scope, options=("second trace", half, scope.options))


def _request(equation: Equation, operands: Sequence[str]) -> str:
    """Returns the mark of a matmul, "" of a line that says nothing, or "told" of an open one."""
    found, is_wide = set(operands), not {_HALF, _PROMOTED}.intersection(operands)
    asked = equation.params.get("preferred_element_type")
    if found == {_HALF} and asked is not None and np.dtype(asked) == F32:
        return marks.UNROUNDED
    if found == {_FLAX} or (_CAST in found and is_wide and _FLAX not in found):
        return marks.in_float32()
    both = found <= {_DERIVED, _REDUCED}
    return "told" if _CAST in found or _DERIVED in found or both else ""


class _Matmuls(list[Equation]):
    """The matmuls of a program in the order of their calls, but for those of layers.

    Attributes:
      operands: what their operands are.
    """

    operands: list[list[str]]

    @classmethod
    def of(cls, jaxpr: Any) -> _Matmuls:
        body, _ = opened(jaxpr)
        found = cls()
        found.operands = []
        found.run(body, [_of(v.aval) for v in body.invars])
        return found

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
        name, stack = equation.primitive.name, equation.source_info.name_stack.stack
        if any(getattr(scope, "name", None) == marks.LAYER for scope in stack):
            return results
        inside = subprograms(equation)
        for one in inside:
            if one.is_run and one.operands is not None:
                made = self.run(one.body, one.given(values))
                results = made if len(made) == len(results) else results
        if inside:
            return results
        if name in primitives.MATMULS:
            self.append(equation)
            self.operands.append(values)
            return results
        if results != [_OTHER] or marks.mark_of(equation) is not None:
            return results
        return [_of_float32(equation, values)]


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
    scaled = [v for v, atom in zip(values, equation.invars, strict=True) if v and _rank(atom)]
    if name in ("mul", "div") and scaled == [_CAST]:
        return _CAST  # by a number
    if {_CAST, _DERIVED, _REDUCED}.intersection(floats):
        return _REDUCED if _REDUCED in floats or _SUMS.match(name) else _DERIVED
    return _OTHER


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _cast_by(equation: Equation) -> str:
    """Returns who widened an operand: a line, Flax, or JAX by promotion."""
    names: set[str] = set()
    for code in _frames(equation)[0]:
        file, name = code.co_filename, code.co_name
        if not file.startswith(_JAX):
            by_line = bool(names & _CASTS) and not names - _CASTS
            return _PROMOTED if not by_line else _FLAX if _is_library(file) else _CAST
        if not _PLUMBING.search(name) and not _TREES.search(file):
            names.add(name)
    return _PROMOTED


def is_promotion(equation: Equation) -> bool:
    """Returns whether JAX put in a cast, for operands of two dtypes, and no line asks for it."""
    return _cast_by(equation) == _PROMOTED


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
_OURS = tuple(os.path.join(os.path.dirname(_HERE), name, "") for name in ("policy", "mpmodules"))


@functools.cache
def _is_library(file: str) -> bool:
    flax = getattr(sys.modules.get("flax"), "__file__", None)
    others = () if flax is None else (os.path.dirname(os.path.abspath(flax)) + os.sep,)
    return file.startswith((_JAX, *_OURS, *others))


def _frames(equation: Equation) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns the code and the offset in it of each frame of an equation, the innermost first."""
    traceback: Any = equation.source_info.traceback
    return traceback.raw_frames() if traceback is not None else ((), ())


def _speaks(equations: Sequence[Equation]) -> bool:
    """Returns whether a file with a function that runs a matmul, or calls one that does, names a
    cast.
    """
    codes = {code for equation in equations for code in _frames(equation)[0]}
    files = {code.co_filename for code in codes}
    return any(
        any(map(_SPEAKS.search, linecache.getlines(file)))
        for file in files
        if not _is_library(file)
    )


def _tell(equation: Equation, half: np.dtype) -> None:
    file, function, line = "", "a function", 0
    for code, offset in zip(*_frames(equation), strict=True):
        if not _is_library(code.co_filename):
            file, function = code.co_filename, code.co_qualname
            line = equation.source_info.traceback.code_addr2line(code, offset)
            break
    source = linecache.getline(file, line).strip()
    warn_once(
        f"{function}, at {os.path.basename(file)}:{line} (`{source}`), multiplies a value that was "
        f"cast to float32, and the policy runs that matmul in {half}. For float32, cast both "
        "operands where they are multiplied, or write `with full_precision():` around it; for "
        f"{half}, leave out the cast."
    )

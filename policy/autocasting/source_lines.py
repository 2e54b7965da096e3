"""Lines of an author's source that an equation comes from, and what they say of dtypes."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from policy.programs.jaxprs import Equation

_SPEAKS = re.compile("astype|asarray|float32|f32|preferred_element_type|convert_element_type")
_GIVES = re.compile(r"preferred_element_type|\bdtype\b.*(float32|f32)|force_float32_reductions")
_CASTS = re.compile("astype|asarray|convert_element_type")
_FLOAT32 = re.compile("float32|f32", re.IGNORECASE)
_OF_CASTS = {"astype", "_astype", "meth", "array", "asarray", "__call__", "convert_element_type"}
_PLUMBING = re.compile(
    "_convert_element_type|bind|process_primitive|current|cache_miss|reraise|jvp|<genexpr>"
)
_LAYERS = ("linear.py", "attention.py", "recurrent.py")
_TREES = re.compile(r"jax._src.tree(_util)?\.py$")

# Who cast a value to float32: a line that names it, a layer of Flax's that was given it, or JAX.
CAST, GIVEN, PROMOTED = "cast", "given", "promoted"

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


def is_of_jax(equation: Equation) -> bool:
    """Returns whether JAX put in a cast, for operands of two dtypes, and no line asks for it."""
    names: set[str] = set()
    for code in frames(equation)[0]:
        if not code.co_filename.startswith(_JAX):
            break
        if not _PLUMBING.search(code.co_name):
            names.add(code.co_name)
    return not names & _OF_CASTS or bool(names - _OF_CASTS)


def cast_by(equation: Equation) -> str:
    """Returns whether a line that names float32 widened an operand, or another, or JAX.

    A dtype that is a field of a model, ``x.astype(self.dtype)``, or an argument of Flax's layers
    is left to the policy.
    """
    names: set[str] = set()
    for code, offset in zip(*frames(equation), strict=True):
        file, name = code.co_filename, code.co_name
        if not file.startswith(_JAX):
            is_cast = bool(names & _OF_CASTS) and not names - _OF_CASTS and not is_library(file)
            if is_file_of_flax(file):
                return GIVEN
            return CAST if is_cast and _names_float32(code, offset) else PROMOTED
        if not _PLUMBING.search(name) and not _TREES.search(file):
            names.add(name)
    return PROMOTED


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


def speaks(equations: Sequence[Equation]) -> bool:
    """Returns whether a function that runs a matmul, or one that it calls, names a cast.

    A layer of Flax's may have been given a preferred_element_type anywhere in the file that calls
    it.
    """
    inside = {code for equation in equations for code in _inside(equation)}
    files = {code.co_filename for code in inside}
    if any(map(is_layers, files)) and any(map(_gives_dtypes, files)):
        return True
    own = {code for code in inside if not is_file_of_flax(code.co_filename)}
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


def is_by_caster(equation: Equation) -> bool:
    """Returns whether the function that runs an equation casts to float32, or tells a
    normalization of Flax's how to compute.
    """
    is_normalization = normalization_of(equation) is not None
    return any(
        casts_to_float32(code) or (is_normalization and _gives_dtypes(code.co_filename))
        for code in writers(equation)
    )


@functools.lru_cache(4096)
def calls_a_cast(code: types.CodeType) -> bool:
    """Returns whether a function names float32 and calls a cast: np.float32(0) is a number."""
    names = " ".join(code.co_names)
    return bool(_CASTS.search(names) and _FLOAT32.search(names))


@functools.lru_cache(4096)
def casts_to_float32(code: types.CodeType) -> bool:
    names = " ".join(code.co_names)
    return bool(_SPEAKS.search(names) and _FLOAT32.search(names))


def normalization_of(equation: Equation) -> str | None:
    """Returns the class of Flax's normalization whose statistics an equation computes, or None."""
    codes = frames(equation)[0]
    names = [code.co_name for code in codes if is_file_of_flax(code.co_filename)]
    if "_compute_stats" not in names[:2]:
        return None
    return next((class_of(code) for code in codes if code.co_name == "__call__"), None)


def class_of(code: types.CodeType) -> str:
    return code.co_qualname.split(".")[0]


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _with_nested(each)


@functools.lru_cache(256)
def _gives_dtypes(file: str) -> bool:
    """Returns whether a file may give layers of Flax's a dtype, or one of their results."""
    return not is_file_of_flax(file) and bool(_GIVES.search("".join(linecache.getlines(file))))


def _is_text(constant: Any) -> bool:
    return isinstance(constant, str | tuple)  # a tuple has the names of keyword arguments


def _inside(equation: Equation) -> Iterator[Any]:
    """Yields the code of the functions around an equation, up to the call that is traced."""
    for code in frames(equation)[0]:
        if code.co_filename.startswith(_TRACES):
            return
        if is_file_of_flax(code.co_filename) or not is_library(code.co_filename):
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
        return not is_library(other) and any(part in other for part in near)

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


def line_of(equation: Equation) -> tuple[str, str]:
    """Returns the function that runs an equation, and the file, number and text of its line."""
    for code, offset in zip(*frames(equation), strict=True):
        if not is_library(code.co_filename):
            line = equation.source_info.traceback.code_addr2line(code, offset)
            text = linecache.getline(code.co_filename, line).strip()
            return code.co_qualname, f"{os.path.basename(code.co_filename)}:{line} (`{text}`)"
    return "a function", "an unknown line"


def writers(equation: Equation) -> set[Any]:
    """Returns the code of the innermost function that is no library's."""
    own = (code for code in frames(equation)[0] if not is_library(code.co_filename))
    return set(itertools.islice(own, 1))


def frames(equation: Equation) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns the code and the offset in it of each frame of an equation, the innermost first."""
    traceback: Any = equation.source_info.traceback
    return traceback.raw_frames() if traceback is not None else ((), ())


@functools.cache
def is_library(file: str) -> bool:
    return file.startswith((_JAX, *_OURS)) or is_file_of_flax(file)


@functools.cache
def is_file_of_flax(file: str) -> bool:
    flax = getattr(sys.modules.get("flax"), "__file__", None)
    return flax is not None and file.startswith(os.path.dirname(os.path.abspath(flax)) + os.sep)


def is_layers(file: str) -> bool:
    """Returns whether a file has layers of Flax's that multiply."""
    return is_file_of_flax(file) and os.path.basename(file) in _LAYERS

"""Lines of an author's source that an equation comes from, and what they say of dtypes."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import itertools
import linecache
import os
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from policy.programs.jaxprs import Equation

_SPEAKS = re.compile(
    "astype|asarray|float32|f32|preferred_element_type|convert_element_type|cast_(to|floating)"
)
_GIVES = re.compile(r"preferred_element_type|\bdtype\b.*(float32|f32)|force_float32_reductions")
_CASTS = re.compile("astype|asarray|convert_element_type")
_FLOAT32 = re.compile("float32|f32", re.IGNORECASE)
_OF_ARRAYS = re.compile(r"(jnp|np|jax|lax|numpy)\.")
_OF_MODEL = re.compile(r"(^|\.)(compute_)?dtype(_\w+)?$|^None$|b?float16")
_OF_CASTS = {"astype", "_astype", "array", "asarray", "__call__", "convert_element_type"}
_OF_OURS = re.compile("cast_(array|floating|to_)|^cast$|^stops$")
_PLUMBING = re.compile("bind|process_primitive|current|cache_miss|reraise|jvp|<genexpr>|^meth$")
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
_OF_POLICIES = os.path.join(_HERE, "core", "")
_OURS = tuple(os.path.join(os.path.dirname(_HERE), name, "") for name in ("policy", "mpmodules"))


def is_of_jax(equation: Equation) -> bool:
    """Returns whether JAX put in a cast, for operands of two dtypes, and no line asks for it."""
    return _called(equation)[0] not in _OF_CASTS


def cast_by(equation: Equation) -> str:
    """Returns whether a line that names float32 cast an operand, or another, or JAX.

    A dtype that is a field of a model, ``x.astype(self.dtype)``, or an argument of a function is
    left to the policy. Constants of a module or class are the line's own words.
    """
    name, code, offset = _called(equation)
    if code is None or is_library(code.co_filename):
        is_flaxs = code is not None and is_file_of_flax(code.co_filename)
        return GIVEN if is_flaxs else PROMOTED
    is_ours = _OF_OURS.search(name) is not None
    return CAST if is_ours or (name in _OF_CASTS and _is_constant(code, offset)) else PROMOTED


def _called(equation: Equation) -> tuple[str, types.CodeType | None, int]:
    """Returns the name of the function of JAX, or of a cast of ours, that the line of an equation
    calls, and the line's code and offset.
    """
    name = ""
    for code, offset in zip(*frames(equation), strict=True):
        file, is_ours = code.co_filename, code.co_filename.startswith(_OF_POLICIES)
        if not file.startswith(_JAX) and not (is_ours and _OF_OURS.search(code.co_name)):
            return name, code, offset
        if not _PLUMBING.search(code.co_name) and not _TREES.search(file):
            name = code.co_name
    return name, None, 0


@functools.lru_cache(4096)
def _is_constant(code: types.CodeType, offset: int) -> bool:
    """Returns whether a call of a cast names a constant dtype, no field or argument of the code.

    It is read from the bytecode: code that was typed in has no source. A local variable may hold
    a function of a constant, `promote_types`.
    """
    instructions = [(*_span(each), each) for each in dis.get_instructions(code)]
    start, end, _ = next(each for each in reversed(instructions) if each[2].offset <= offset)
    within = [each for each in instructions if start <= each[0] and each[1] <= end]
    callee = [last for first, last, _ in within if first == start and last < end]
    called = max(callee, default=start)
    names = [str(each.argval) for *span, each in within if called in span]
    said = [each for first, _, each in within if first > called]
    if any(map(_FLOAT32.search, (*names, *(str(each.argval) for each in said)))):
        return True
    if not _OF_CASTS.intersection(names):
        return True  # a function that holds the dtype
    roots = [each for each in said if each.opname.startswith(_ROOTS) and not _is_flag(each)]
    is_local = bool(roots) and roots[-1].opname.startswith(_ROOTS[:2])
    return not is_local or ("promote_types" in code.co_names and casts_to_float32(code))


_ROOTS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST")


def _is_flag(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and not isinstance(instruction.argval, str)


def _span(instruction: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the line and column of the start and of the end of an instruction's source."""
    line, last, column, end = (each or 0 for each in instruction.positions or (0,) * 4)
    return (line, column), (last, end)


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
    return any(
        name in _speaking(code.co_filename)
        for code in around
        for name in (*code.co_names, *code.co_freevars)
    ) or any(map(_speaks, around))


def _speaks(code: types.CodeType) -> bool:
    """Returns whether the names or texts of a function, or names of arguments, say a cast."""
    texts = (str(each) for each in code.co_consts if isinstance(each, str | tuple))
    return any(map(_SPEAKS.search, (*code.co_names, *texts)))


@functools.lru_cache(4096)
def names_dtypes(code: types.CodeType) -> bool:
    """Returns whether a function, or one inside it, names a cast or a dtype of a result."""
    return any(map(_speaks, _with_nested(code)))


@functools.lru_cache(256)
def gives_float32(file: str) -> bool:
    """Returns whether a call in a file has a ``dtype`` of its own, such as ``dtype=float32`` or
    ``dtype=self.head_dtype``, and not that of the whole model; also where there is no source.
    """
    lines = linecache.getlines(file)
    try:
        nodes = list(ast.walk(ast.parse("".join(lines))))
    except SyntaxError:  # cells of a notebook may have commands
        return True
    given = [
        ast.unparse(keyword.value)
        for node in nodes
        if isinstance(node, ast.Call) and not _OF_ARRAYS.match(ast.unparse(node.func))
        for keyword in node.keywords
        if keyword.arg == "dtype"
    ]
    return not lines or not all(map(_OF_MODEL.search, given))


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


def _inside(equation: Equation) -> Iterator[Any]:
    """Yields the code of the functions around an equation, up to the call that is traced."""
    for code in frames(equation)[0]:
        if code.co_filename.startswith(_TRACES):
            return
        if is_file_of_flax(code.co_filename) or not is_library(code.co_filename):
            yield code


@functools.lru_cache(256)
def _speaking(file: str) -> set[str]:
    """Returns the names of a module's file that stand for a cast to float32, or for that dtype.

    These are functions that the file defines, or imports from its package or folder, and the
    classes, containers and partial functions that hold such.
    """
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    packages = {m.__name__.split(".")[0] for m in modules} - {"__main__"}
    near = (os.path.dirname(file), *(os.sep + package + os.sep for package in packages))
    found: set[str] = set()
    for name, value in (item for module in modules for item in list(vars(module).items())):
        with contextlib.suppress(Exception):  # proxies raise whatever they like
            if functions := set(_casts_in(value, near, set())):
                found |= {name, *functions}
    return found


def _casts_in(value: Any, near: Sequence[str], seen: set[int]) -> Iterator[str]:
    """Yields the names of the functions in a value that cast to float32."""
    if id(value) in seen or isinstance(value, types.ModuleType):
        return
    seen.add(id(value))
    name = str(value if isinstance(value, str | np.dtype) else getattr(value, "__name__", ""))
    if _SPEAKS.fullmatch(name):
        yield name
    held = getattr(value, "__wrapped__", None)
    inside: list[Any] = [] if held is None else [held]
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict | list | tuple):
        inside = list(itertools.islice(value.values() if isinstance(value, dict) else value, 256))
    elif isinstance(value, types.FunctionType):
        inside += [each.cell_contents for each in value.__closure__ or () if each != _EMPTY]
        if _is_near(value.__code__.co_filename, near):
            yield from (each.co_name for each in _with_nested(value.__code__) if _speaks(each))
    elif isinstance(value, classmethod | staticmethod | types.MethodType):
        inside = [value.__func__]
    else:
        cls = value if isinstance(value, type) else type(value)
        file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
        inside += vars(cls).values() if _is_near(file, near) else ()
    for each in inside:
        yield from _casts_in(each, near, seen)


def _is_near(file: str, near: Sequence[str]) -> bool:
    return not is_library(file) and any(part in file for part in near)


_EMPTY = types.CellType()


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

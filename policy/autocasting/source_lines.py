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

from policy.programs.jaxprs import Equation, OpenJaxpr

_SPEAKS = re.compile(
    "astype|asarray|float32|f32|preferred_element_type|convert_element_type|cast_(to|floating)"
)
_GIVES = re.compile(r"preferred_element_type|\bdtype\b.*(float32|f32)|force_float32_reductions")
_CASTS = re.compile("astype|asarray|convert_element_type|preferred_element_type")
_FLOAT32 = re.compile("float32|f32", re.IGNORECASE)
_HELPERS = 2  # how many calls around a cast may name its dtype
_OF_ARRAYS = re.compile(r"(jnp|np|jax|lax|numpy)\.")
_OF_MODEL = re.compile(r"(^|\.)(compute_)?dtype(_\w+)?$|^None$|b?float16")
_OF_CASTS = {"astype", "_astype", "array", "asarray", "__call__", "convert_element_type"}
_OF_CASTS |= {"promote_dtype"}
_OF_OURS = re.compile("cast_(array|floating|to_)|^cast$|^stops$")
_PLUMBING = re.compile("bind|process_primitive|current|cache_miss|reraise|jvp|<genexpr>|^meth$")
_LAYERS = ("linear.py", "attention.py", "recurrent.py")
_LINEAR_ALGEBRA = "linalg"  # in the names of JAX's files
_HIGHEST = (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)
_PRODUCTS = {"matmul", "matrix_power", "multi_dot", "outer", "tensordot", "vecdot"}
_TREES = re.compile(r"jax._src.tree(_util)?\.py$")

# Who cast a value to float32: a line that names it, a layer of Flax's that was given it, or JAX.
CAST, GIVEN, PROMOTED = "cast", "given", "promoted"

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_JAX_NN = os.path.join(_JAX, "_src", "nn", "")
_TRACES = tuple(
    os.path.join(_HERE, *path)
    for path in (
        ("programs", "tracing", "pure_calls.py"),
        ("autocasting", "transform.py"),
        ("autocasting", "derivative_rules.py"),
    )
)
_OF_POLICIES = os.path.join(_HERE, "core", "")
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
_OURS = tuple(os.path.join(os.path.dirname(_HERE), name, "") for name in ("policy", "mpmodules"))


def is_of_jax(equation: Equation) -> bool:
    """Returns whether JAX put in a cast, for operands of two dtypes, and no line asks for it."""
    return _called(equation)[0] not in _OF_CASTS


def cast_by(equation: Equation, around: Equation | None = None) -> str:
    """Returns whether a line that names float32 cast an operand, or another, or JAX.

    A dtype that is a field of a model, ``x.astype(self.dtype)``, or an argument of a function is
    left to the policy, unless the call of that function names float32. Constants of a module or
    class are the line's own words.

    Args:
      equation: the cast.
      around: the call of the program that it is in, such as one of `jax.jit`.
    """
    name, calls = _called(equation)
    if not calls or is_library(calls[0][0].co_filename):
        is_flaxs = bool(calls) and is_file_of_flax(calls[0][0].co_filename)
        return GIVEN if is_flaxs else PROMOTED
    if _OF_OURS.search(name) is not None:
        return CAST
    if name not in _OF_CASTS:
        return PROMOTED
    if around is not None:
        calls += zip(*frames(around), strict=True)
    outer = [each for each in calls[1:] if not is_library(each[0].co_filename)]
    is_named = _is_constant(*calls[0]) or any(_names_float32(*each) for each in outer[:_HELPERS])
    return CAST if is_named else PROMOTED


def _called(equation: Equation) -> tuple[str, list[tuple[types.CodeType, int]]]:
    """Returns the name of the function of JAX, or of a cast of Flax's or ours, that the line of an
    equation calls, and the code and the offset of the line and of the calls around it.
    """
    name, calls = "", list(zip(*frames(equation), strict=True))
    for i, (code, _) in enumerate(calls):
        file, is_ours = code.co_filename, code.co_filename.startswith(_OF_POLICIES)
        is_cast = (is_ours and _OF_OURS.search(code.co_name)) or _is_promotion(file)
        if not file.startswith(_JAX) and not is_cast:
            return name, calls[i:]
        if not _PLUMBING.search(code.co_name) and not _TREES.search(file):
            name = code.co_name
    return name, []


@functools.lru_cache(4096)
def _is_constant(code: types.CodeType, offset: int) -> bool:
    """Returns whether a call of a cast names a constant dtype, no field or argument of the code.

    It is read from the bytecode: code that was typed in has no source.
    """
    names, said = _words(code, offset)
    if any(map(_FLOAT32.search, (*names, *(str(each.argval) for each in said)))):
        return True
    if not _OF_CASTS.intersection(names):
        return True  # a function that holds the dtype
    roots = [each for each in said if each.opname.startswith(_ROOTS) and not _is_flag(each)]
    if not roots or not roots[-1].opname.startswith(_ROOTS[:2]):
        return True
    is_field = any(each.opname == "LOAD_ATTR" for each in said[said.index(roots[-1]) :])
    return not is_field and _is_set_to_float32(code, roots[-1].argval)


@functools.lru_cache(4096)
def _names_float32(code: types.CodeType, offset: int) -> bool:
    """Returns whether an argument of a call is float32 itself, and not an array made in it."""
    _, said = _words(code, offset)
    calls = [_span(each) for each in said if each.opname.startswith("CALL")]
    named = [_span(each) for each in said if _FLOAT32.fullmatch(str(each.argval))]
    return any(not any(a <= start and end <= b for a, b in calls) for start, end in named)


def _words(code: types.CodeType, offset: int) -> tuple[list[str], list[dis.Instruction]]:
    """Returns the names in the callee of a call, and the instructions of its arguments."""
    instructions = [(*_span(each), each) for each in dis.get_instructions(code)]
    start, end, _ = next(each for each in reversed(instructions) if each[2].offset <= offset)
    within = [each for each in instructions if start <= each[0] and each[1] <= end]
    callee = [last for first, last, _ in within if first == start and last < end]
    called = max(callee, default=start)
    names = [str(each.argval) for *span, each in within if called in span]
    return names, [each for first, _, each in within if first > called]


def _is_set_to_float32(code: types.CodeType, name: str) -> bool:
    """Returns whether a line that sets a local variable names float32, and no other choice."""
    instructions = list(dis.get_instructions(code))
    lines = {
        _span(each)[0][0]
        for each in instructions
        if each.opname.startswith("STORE_") and each.argval == name
    }
    told = [each for each in instructions if _span(each)[0][0] in lines]
    is_choice = any("JUMP" in each.opname for each in told)
    return not is_choice and any(_FLOAT32.search(str(each.argval)) for each in told)


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
    around = [each for code in own for each in with_nested(code)]
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
    return any(map(_speaks, with_nested(code)))


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
def asks_for_float32(code: types.CodeType) -> bool:
    """Returns whether a function names float32 and calls a cast, or chooses the dtype of a result:
    np.float32(0) is a number.
    """
    words = " ".join((*code.co_names, *(str(each) for each in code.co_consts)))
    return bool(_CASTS.search(words) and _FLOAT32.search(" ".join(code.co_names)))


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


def with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from with_nested(each)


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

    These are functions that the file defines, or imports from its package or from files that are
    not installed, and the classes, containers and partial functions that hold such.
    """
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    packages = {m.__name__.split(".")[0] for m in modules} - {"__main__"}
    near = (os.path.dirname(file), *(os.sep + package + os.sep for package in packages))
    modules = modules or [sys.modules["__main__"]]  # a cell of a notebook
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
    held = getattr(value, "__func__", None) or getattr(value, "__wrapped__", None)
    inside: list[Any] = [] if held is None else [held]
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict | list | tuple):
        inside = list(itertools.islice(value.values() if isinstance(value, dict) else value, 256))
    elif isinstance(value, types.FunctionType):
        inside += [each.cell_contents for each in value.__closure__ or () if each != _EMPTY]
        if _is_near(value.__code__.co_filename, near):
            yield from (each.co_name for each in with_nested(value.__code__) if _speaks(each))
    else:
        cls = value if isinstance(value, type) else type(value)
        file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
        inside += vars(cls).values() if _is_near(file, near) else ()
    for each in inside:
        yield from _casts_in(each, near, seen)


def _is_near(file: str, near: Sequence[str]) -> bool:
    is_installed = file.startswith(_PYTHON) or any(part in file for part in _INSTALLED)
    return (
        bool(file)
        and not is_library(file)
        and (not is_installed or any(part in file for part in near))
    )


_EMPTY = types.CellType()


def multiplies_for_linear_algebra(equation: Equation) -> bool:
    """Returns whether a matmul is one that JAX multiplies precisely inside of a function of linear
    algebra, such as `jax.scipy.linalg.expm`.
    """
    if equation.params.get("precision") not in _HIGHEST:
        return False
    return any(
        _LINEAR_ALGEBRA in code.co_filename and code.co_name not in _PRODUCTS
        for code in _codes_of_jax(equation)
    )


def is_of_activation(equation: Equation) -> bool:
    """Returns whether an operation stands in a function of `jax.nn`, whose approximations compute
    with numbers of their own.
    """
    return any(code.co_filename.startswith(_JAX_NN) for code in _codes_of_jax(equation))


def _codes_of_jax(equation: Equation) -> Iterator[types.CodeType]:
    """Yields the code of JAX's functions that the line of an equation calls."""
    is_of_jax = lambda code: code.co_filename.startswith(_JAX)  # noqa: E731
    return itertools.takewhile(is_of_jax, frames(equation)[0])


def is_of_linear_algebra(body: OpenJaxpr) -> bool:
    """Returns whether a program is a function of JAX's linear algebra."""
    info = body.debug_info
    return info is not None and _JAX in info.func_src_info and _LINEAR_ALGEBRA in info.func_src_info


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
def _is_promotion(file: str) -> bool:
    """Returns whether a file of Flax's holds `promote_dtype`."""
    return is_file_of_flax(file) and os.path.basename(file) == "dtypes.py"


@functools.cache
def is_file_of_flax(file: str) -> bool:
    flax = getattr(sys.modules.get("flax"), "__file__", None)
    return flax is not None and file.startswith(os.path.dirname(os.path.abspath(flax)) + os.sep)


def is_layers(file: str) -> bool:
    """Returns whether a file has layers of Flax's that multiply."""
    return is_file_of_flax(file) and os.path.basename(file) in _LAYERS

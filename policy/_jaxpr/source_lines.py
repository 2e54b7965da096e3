"""The lines of users' code that equations come from: what reports name, rather than a line of a
library below it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from typing import Any, Literal

from policy._jaxpr.origins import is_jax_file
from policy._jaxpr.paths import Path, spelled

_POLICY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
# What traces a call for an inspection tool: whoever called the tool did not write what it looks at.
_TOOLS = tuple(
    os.path.join(_POLICY, name) for name in ("inspection" + os.sep, "tracing.py", "testing.py")
)
_LIBRARIES = ("flax", "optax", "mpmodules")
_BASES = frozenset(
    ("Module", "Scope", "Object", "Pytree")
)  # of Flax, whose methods call those of layers


def source_of(equation: Any) -> str:
    """The line of the user's code that an equation comes from, as ``model.py:12 (Net.__call__)``;
    "" where none is.

    It is the innermost line that is not of JAX, Flax, Optax, this library or Python's own modules.
    """
    for code, instruction in _frames(equation):
        owner = _owner(code.co_filename)
        if owner == "tool":
            return ""
        if owner == "user":
            return f"{os.path.basename(code.co_filename)}:{_line(code, instruction)} ({_shortened(code.co_qualname)})"
    return ""


def layer_of(equation: Any, path: Path) -> str:
    """The module that an equation is part of, as ``encoder/out (Dense)``, for one that no line of a
    user's called.
    """
    where = spelled(path)
    for code, _ in _frames(equation):
        owner = _owner(code.co_filename)
        names = _shortened(code.co_qualname).split(".")
        if owner == "tool":
            break
        if code.co_filename.startswith(_folders()) and len(names) == 2 and names[0] not in _BASES:
            return names[0] if not where or where.endswith(":") else f"{where} ({names[0]})"
    return where.removesuffix(":")


def is_users_file(file: str) -> bool:
    """Returns whether a file is of none of the libraries below a user's code."""
    return _owner(file) == "user"


def _frames(equation: Any) -> Iterator[tuple[Any, int]]:
    """The code objects and places in them that an equation was traced in, from the innermost out."""
    traceback = getattr(equation.source_info, "traceback", None)
    return iter(()) if traceback is None else zip(*traceback.raw_frames(), strict=True)


def _line(code: Any, instruction: int) -> int:
    lines = (
        line
        for start, end, line in code.co_lines()
        if start <= instruction < end and line is not None
    )
    return next(lines, code.co_firstlineno)


@functools.lru_cache(maxsize=4096)
def _shortened(name: str) -> str:
    """A function's own name, with its class where it is a method; of a lambda, the function that it
    is in.
    """
    names = [part for part in name.split(".") if not part.startswith("<")]
    is_method = len(names) > 1 and names[-2][:1].isupper()
    return ".".join(names[-2:] if is_method else names[-1:]) or name


@functools.lru_cache(maxsize=4096)
def _owner(file: str) -> Literal["user", "library", "tool"]:
    if file.startswith(_TOOLS):
        return "tool"
    if is_jax_file(file) or file.startswith((_POLICY, *_folders())):
        return "library"
    is_python = (
        file.startswith(_STDLIB) and "site-packages" not in file and "dist-packages" not in file
    )
    return "library" if is_python else "user"


@functools.cache
def _folders() -> tuple[str, ...]:
    """The folders of the libraries that are installed, none of which is imported for this."""
    specs = filter(None, map(importlib.util.find_spec, _LIBRARIES))
    return tuple(
        os.path.abspath(folder) + os.sep
        for spec in specs
        for folder in spec.submodule_search_locations or ()
    )

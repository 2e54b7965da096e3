"""Lines of users' code that equations come from, which reports name in place of library code."""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig
from collections.abc import Iterable
from typing import Literal

from policy.programs.origins import OUR_FOLDER, frames_of, is_jax_file
from policy.programs.paths import Path, spelled
from policy.programs.protocols import Equation

_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
# Files that trace a call for an inspection tool: its caller is not the author of the code.
_TOOLS = tuple(
    os.path.join(OUR_FOLDER, *parts)
    for parts in (("inspect", ""), ("programs", "tracing", "trace.py"))
)
_LIBRARIES = ("flax", "optax", "mpmodules")
_BASES = frozenset(
    ("Module", "Scope", "Object", "Pytree")
)  # of Flax, whose methods call those of layers


def source_of(equation: Equation) -> str:
    """Returns the line of the user's code that an equation comes from; "" if there is none.

    It reads ``model.py:12 (Net.__call__)``, and is the innermost line outside of JAX, Flax, Optax,
    this library and Python's own modules.
    """
    return users_line(frames_of(equation))


def users_line(frames: Iterable[tuple[str, int, str]]) -> str:
    """Returns the line of the user's code among frames, as `source_of` writes it.

    Args:
      frames: files, lines and qualified names of functions, the innermost first.
    """
    for file, line, function in frames:
        owner = _owner(file)
        if owner == "tool":
            return ""
        if owner == "user":
            where = f"{os.path.basename(file)}:{line}"
            return f"{where} ({_shortened(function)})" if function else where
    return ""


def layer_of(equation: Equation, path: Path) -> str:
    """Returns the module of an equation that no line of the user's code called.

    It reads ``encoder/out (Dense)``.
    """
    where = spelled(path)
    for file, _, function in frames_of(equation):
        if _owner(file) == "tool":
            break
        names = _shortened(function).split(".")
        if _may_be_of_a_layer(file) and len(names) == 2 and names[0] not in _BASES:
            if names[1].startswith("_") and not names[1].startswith("__"):
                continue  # a part of a layer's method, maybe of a base class
            return names[0] if not where or where.endswith(":") else f"{where} ({names[0]})"
    return where.removesuffix(":")


def is_users_file(file: str) -> bool:
    """Returns whether a file is user code, in none of the libraries below it."""
    return _owner(file) == "user"


@functools.lru_cache(maxsize=4096)
def _shortened(name: str) -> str:
    """Returns the own name of a function, with the class of a method.

    For a lambda, it is that of the enclosing function.
    """
    names = [part for part in name.split(".") if not part.startswith("<")]
    is_method = len(names) > 1 and names[-2][:1].isupper()
    return ".".join(names[-2:] if is_method else names[-1:]) or name


@functools.lru_cache(maxsize=4096)
def _owner(file: str) -> Literal["user", "library", "tool"]:
    if file.startswith(_TOOLS):
        return "tool"
    if is_jax_file(file) or file.startswith((OUR_FOLDER, *_folders())):
        return "library"
    is_python = (
        file.startswith(_STDLIB) and "site-packages" not in file and "dist-packages" not in file
    )
    return "library" if is_python else "user"


def _may_be_of_a_layer(file: str) -> bool:
    """Returns whether layers are defined in a file: no file that our two wings share does."""
    _, ours, inside = file.rpartition(f"{os.sep}mpmodules{os.sep}")
    is_shared = bool(ours) and not inside.startswith((f"linen{os.sep}", f"nnx{os.sep}"))
    return file.startswith(_folders()) and not is_shared


@functools.cache
def _folders() -> tuple[str, ...]:
    """Returns the folders of the installed libraries, without importing them."""
    specs = filter(None, map(importlib.util.find_spec, _LIBRARIES))
    return tuple(
        os.path.abspath(folder) + os.sep
        for spec in specs
        for folder in spec.submodule_search_locations or ()
    )

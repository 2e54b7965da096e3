"""Authors of equations, read from tracebacks: functions that cast, and lines of users' code, which
reports name in place of library code.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Literal

from jax.extend import source_info_util

from policy.programs.jaxprs import Equation
from policy.programs.paths import Path, spelled
from policy.programs.reading.walk import Site, is_jax_file

OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_OUR_LAYERS = os.path.join(os.path.dirname(os.path.dirname(OUR_FOLDER)), "mpmodules") + os.sep
# Functions of JAX that are asked for a dtype, by name: a cast below one of them was meant.
_SUMS = {"sum", "mean", "var", "std", "prod", "average", "cumsum", "cumprod", "trace"}
_SUMS |= {"nansum", "nanmean", "nanvar"}
_SUMS |= {"logsumexp", "softmax", "log_softmax", "dot_product_attention"}
_CASTS = {"astype", "_astype", "asarray", "array", "convert_element_type", "full", "full_like"}
_CASTS |= {"view", "stochastic_round"}


# --------------------------------------------------------------------------------------------------
# Authors
# --------------------------------------------------------------------------------------------------


def is_promotion(equation: Equation) -> bool:
    """Returns whether a cast is a promotion of mixed dtypes that no function was asked for.

    Functions of libraries that are named for it, as Flax's ``promote_dtype``, count as promoting.
    Returns False if the traceback is unknown. Also False for code of this library that was traced
    once and inlined by JAX, because its traceback ends at the call.
    """
    _, author = author_of(equation)
    inner = [function for _, function in _until_author(equation)]
    if inner[-1:] == ["reraise_with_filtered_traceback"] and is_ours(equation):
        return False
    is_unasked = bool(inner) and not (_CASTS | _SUMS).intersection(inner)
    return author.startswith("promote_") or is_unasked


def author_of(equation: Equation) -> tuple[str, str]:
    """Returns the file and function of the innermost code outside of JAX; ("", "") if unknown."""
    authors = (frame for frame in _frames(equation) if not is_jax_file(frame[0]))
    return next(authors, ("", ""))


def is_by_layers(equation: Equation) -> bool:
    """Returns whether a library makes this cast at each use of a weight.

    The library is this one, or one with a ``promote_dtype``.
    """
    return is_ours(equation) or author_of(equation)[1].startswith("promote_")


def is_ours(equation: Equation) -> bool:
    """Returns whether this library wrote an equation."""
    return author_of(equation)[0].startswith((OUR_FOLDER, _OUR_LAYERS))


def _until_author(equation: Equation) -> Iterator[tuple[str, str]]:
    """Returns the frames of JAX between an equation and its author, innermost first."""
    return itertools.takewhile(lambda frame: is_jax_file(frame[0]), _frames(equation))


def _frames(equation: Equation) -> list[tuple[str, str]]:
    """Returns the file and function of each frame, innermost first."""
    frames = frames_of(equation)
    return [(file, _shortened(function).rpartition(".")[2]) for file, _, function in frames]


def frames_of(equation: Equation) -> list[tuple[str, int, str]]:
    """Returns the frames of an equation, innermost first: file, line, qualified function name."""
    traceback = getattr(equation.source_info, "traceback", None)
    frames = () if traceback is None else traceback.frames
    return [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]


_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
# Files that trace a call for an inspection tool: its caller is not the author of the code.
_TOOLS = (
    os.path.join(OUR_FOLDER, "inspect", ""),
    os.path.join(OUR_FOLDER, "programs", "tracing", "trace.py"),
)
_LIBRARIES = ("flax", "optax", "mpmodules")
_BASES = ("Module", "Scope", "Object", "Pytree")  # of Flax, whose methods call those of layers


# --------------------------------------------------------------------------------------------------
# Lines of users' code
# --------------------------------------------------------------------------------------------------


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

    For a lambda or a comprehension, it is that of the enclosing function.
    """
    names = [part for part in name.split(".") if not part.startswith("<")]
    is_method = len(names) > 1 and names[-2][:1].isupper()
    return ".".join(names[-2:] if is_method else names[-1:]) or name


@functools.lru_cache(maxsize=4096)
def _owner(file: str) -> Literal["user", "library", "tool"]:
    if file.startswith(_TOOLS):
        return "tool"
    is_python = file.startswith(_STDLIB) and not (
        "site-packages" in file or "dist-packages" in file
    )
    is_library = is_jax_file(file) or file.startswith((OUR_FOLDER, *_folders())) or is_python
    return "library" if is_library else "user"


def _may_be_of_a_layer(file: str) -> bool:
    """Returns whether layers are defined in a file: no file that our two APIs share does."""
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


def source_of_site(site: Site) -> str:
    """Returns the line of the user's code that an equation comes from, as `source_of` writes it.

    Where no code of a user's called the module, the path and class of the module,
    ``encoder/out (Dense)``; or "".
    """
    return _line_of_site(site) or layer_of(site.equation, site.path)


def _line_of_site(site: Site) -> str:
    if site.call is not None:
        return source_of(site.call)
    return source_of(site.equation) or ("" if site.around is None else _line_of_site(site.around))


def written_at(equation: Equation) -> str:
    """Returns the innermost line outside of JAX that an equation comes from."""
    return source_info_util.summarize(equation.source_info)

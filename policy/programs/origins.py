"""Authors of equations, read from tracebacks: casts as written, and unrequested promotions."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import jax
import jaxlib

from policy.programs.protocols import Equation

_JAX = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (jax, jaxlib)
)
OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OUR_LAYERS = os.path.join(os.path.dirname(os.path.dirname(OUR_FOLDER)), "mpmodules") + os.sep
# Functions of JAX that are asked for a dtype, by name: a cast below one of them was meant.
_SUMS = frozenset(
    (
        *("sum", "mean", "var", "std", "prod", "average", "cumsum", "cumprod", "trace"),
        *("nansum", "nanmean", "nanvar"),
        *("logsumexp", "softmax", "log_softmax", "dot_product_attention"),
    )
)
_CASTS = frozenset(
    (
        *("astype", "_astype", "asarray", "array", "convert_element_type", "full", "full_like"),
        *("view", "stochastic_round"),
    )
)
_ASKED = _CASTS | _SUMS


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
    return _promotes(author) or (bool(inner) and not _ASKED.intersection(inner))


def author_of(equation: Equation) -> tuple[str, str]:
    """Returns the file and function of the innermost code outside of JAX; ("", "") if unknown."""
    return next(authors_of(equation), ("", ""))


def authors_of(equation: Equation) -> Iterator[tuple[str, str]]:
    """Returns the files and functions outside of JAX around an equation, innermost first."""
    return (frame for frame in _frames(equation) if not is_jax_file(frame[0]))


def is_by_layers(equation: Equation) -> bool:
    """Returns whether a library makes this cast at each use of a weight.

    The library is this one, or one with a ``promote_dtype``.
    """
    return is_ours(equation) or _promotes(author_of(equation)[1])


def is_ours(equation: Equation) -> bool:
    """Returns whether this library wrote an equation."""
    return author_of(equation)[0].startswith((OUR_FOLDER, _OUR_LAYERS))


def is_written(equation: Equation) -> bool:
    """Returns whether a cast was written out, not made by a JAX function that sums in float32."""
    return not _SUMS.intersection(function for file, function in _until_author(equation))


def _until_author(equation: Equation) -> Iterator[tuple[str, str]]:
    """Yields the frames of JAX between an equation and its author, innermost first."""
    for frame in _frames(equation):
        if not is_jax_file(frame[0]):
            return
        yield frame


def _frames(equation: Equation) -> list[tuple[str, str]]:
    """Returns the file and function of each frame, innermost first."""
    return [(file, _name(function)) for file, _, function in frames_of(equation)]


def frames_of(equation: Equation) -> list[tuple[str, int, str]]:
    """Returns the frames of an equation, innermost first: file, line, qualified function name."""
    traceback = getattr(equation.source_info, "traceback", None)
    frames = () if traceback is None else traceback.frames
    return [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]


@functools.lru_cache(maxsize=4096)
def _name(function: str) -> str:
    """Returns the own name of a function; for a comprehension, that of the enclosing function."""
    names = [name for name in function.split(".") if not name.startswith("<")]
    return names[-1] if names else function


def _promotes(function: str) -> bool:
    return function.startswith("promote_")


@functools.lru_cache(maxsize=4096)
def is_jax_file(file: str) -> bool:
    """Returns whether a file belongs to JAX."""
    return file.startswith(_JAX) or file.startswith("<frozen")

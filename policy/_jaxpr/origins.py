"""Who wrote an equation: the author of a cast, or a promotion that nobody asked for. Read from
tracebacks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jaxlib

_JAX = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (jax, jaxlib)
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OUR_LAYERS = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "mpmodules") + os.sep
# Functions of JAX that are asked for a dtype, by name: a cast below one of them was meant.
_SUMS = frozenset(
    (
        *(
            "sum",
            "mean",
            "var",
            "std",
            "prod",
            "average",
            "cumsum",
            "cumprod",
            "nansum",
            "nanmean",
            "nanvar",
            "trace",
        ),
        *("logsumexp", "softmax", "log_softmax", "dot_product_attention"),
    )
)
_CASTS = frozenset(
    (
        "astype",
        "_astype",
        "asarray",
        "array",
        "convert_element_type",
        "full",
        "full_like",
        "view",
        "stochastic_round",
    )
)
_ASKED = _CASTS | _SUMS


def is_promotion(equation: Any) -> bool:
    """Whether a cast comes of two dtypes that met, and of no function that was asked for a dtype.

    A function of a library whose name says so (Flax's ``promote_dtype``) counts as one that
    promotes. False where the traceback is not known, and of what this library traced once and JAX
    inlined: its traceback ends at the call.
    """
    _, author = author_of(equation)
    inner = [function for _, function in _until_author(equation)]
    if inner[-1:] == ["reraise_with_filtered_traceback"] and is_ours(equation):
        return False
    return _promotes(author) or (bool(inner) and not _ASKED.intersection(inner))


def author_of(equation: Any) -> tuple[str, str]:
    """The file and the function of the innermost code that is not JAX's own; ("", "") where
    unknown.
    """
    return next((frame for frame in _frames(equation) if not is_jax_file(frame[0])), ("", ""))


def authors_of(equation: Any) -> Iterator[tuple[str, str]]:
    """The files and functions of what is not JAX's own around an equation, from the innermost out."""
    return (frame for frame in _frames(equation) if not is_jax_file(frame[0]))


def is_by_layers(equation: Any) -> bool:
    """Whether a cast is one that a library makes at each use of a weight: this one's, or a
    ``promote_dtype``.
    """
    return is_ours(equation) or _promotes(author_of(equation)[1])


def is_ours(equation: Any) -> bool:
    """Whether this library wrote an equation."""
    return author_of(equation)[0].startswith((_OURS, _OUR_LAYERS))


def is_written(equation: Any) -> bool:
    """Whether a cast was written as one, and is no part of a function of JAX's that sums in float32
    by itself.
    """
    return not _SUMS.intersection(function for file, function in _until_author(equation))


def _until_author(equation: Any) -> Iterator[tuple[str, str]]:
    """The frames of JAX's own between an equation and its author, from the innermost out."""
    for frame in _frames(equation):
        if not is_jax_file(frame[0]):
            return
        yield frame


def _frames(equation: Any) -> list[tuple[str, str]]:
    """Files and functions, from the innermost out."""
    traceback = getattr(equation.source_info, "traceback", None)
    if traceback is None:
        return []
    return [(frame.file_name, _name(frame.function_name)) for frame in traceback.frames]


@functools.lru_cache(maxsize=4096)
def _name(function: str) -> str:
    """A function's own name, without those around it; of a comprehension, the name of the function
    that it is in.
    """
    names = [name for name in function.split(".") if not name.startswith("<")]
    return names[-1] if names else function


def _promotes(function: str) -> bool:
    return function.startswith("promote_")


@functools.lru_cache(maxsize=4096)
def is_jax_file(file: str) -> bool:
    """Whether a file is of JAX's own code."""
    return file.startswith(_JAX) or file.startswith("<frozen")

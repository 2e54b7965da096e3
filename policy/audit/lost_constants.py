"""Constants that were lost while a function was traced: before there was a program that could tell."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

import numpy as np

from policy._jaxpr.source_lines import is_users_file

_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep


@dataclasses.dataclass
class Lost:
    """Lines of user code, as ``model.py:12``, where NumPy cast a number to a dtype that can't hold
    it.
    """

    overflowed: set[str] = dataclasses.field(default_factory=set)
    vanished: set[str] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def noticing() -> Iterator[Lost]:
    """Notes what NumPy says of casts while a function is traced in this thread: JAX casts constants
    by it.
    """
    lost = Lost()

    def note(kind: str, _: int) -> None:
        lines = lost.overflowed if "overflow" in kind else lost.vanished
        lines.add(_line())

    with np.errstate(over="call", under="call", call=note):
        yield lost


def _line() -> str:
    """The innermost line of the user's code, as reports name it."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file) and not file.startswith(_NUMPY):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

"""Constants that overflow or vanish while a function is traced, before there is a jaxpr."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

import numpy as np

from policy.programs.reading.source_lines import is_users_file

_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep


@dataclasses.dataclass
class Lost:
    """Lines of user code, as ``model.py:12``, where a constant did not fit into its dtype.

    Attributes:
      overflowed: lines where NumPy reported an overflow.
      vanished: lines where NumPy reported an underflow.
    """

    overflowed: set[str] = dataclasses.field(default_factory=set)
    vanished: set[str] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def noticing() -> Iterator[Lost]:
    """Records the overflows and underflows of NumPy while a function is traced in this thread.

    JAX casts constants with NumPy.
    """
    lost = Lost()

    def note(kind: str, _: int) -> None:
        lines = lost.overflowed if "overflow" in kind else lost.vanished
        lines.add(_line())

    with np.errstate(over="call", under="call", call=note):
        yield lost


def _line() -> str:
    """Returns the innermost line of user code, in the format of reports."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file) and not file.startswith(_NUMPY):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

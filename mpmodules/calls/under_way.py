"""The calls of modules under way in a thread, and what they note for one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policy.programs.thread import ThreadValues


class _LinenCalls(ThreadValues):
    """The calls of linen modules under way in this thread.

    Attributes:
      recorded: what a summary records of calls, or None where none is being made.
      innermost: the module of the innermost call.
      paths: those of the modules, the innermost last.
      root: the module of the root call.
      seen: the classes of the modules that the root call has seen so far, by path; None where no
        root call is under way.
      validates: whether Flax may run a setup to check it.
      adopters: those of `mpmodules.linen._port` in force, the innermost last.
      traced: the name of the model or module whose call is the outermost of a trace for a report;
        "" where none is.
      traced_model: the same, where it is a whole model and no module of one.
    """

    recorded: Any = None
    innermost: Any = None
    paths: Sequence[tuple[str, ...]] = ()
    root: Any = None
    seen: dict[tuple[str, ...], set[type]] | None = None
    validates: bool = True
    adopters: Sequence[Any] = ()
    traced: str = ""
    traced_model: str = ""


class _NnxCalls(ThreadValues):
    """The calls of nnx modules under way in this thread, and the constructions of modules.

    Attributes:
      recorded: what a summary records of calls, or None where none is being made.
      depth: the number of calls.
      inside: the number of calls in the innermost one so far.
      constructions: the constructions, the innermost last.
      path: that of the named module whose call is the innermost in a trace for a report.
    """

    recorded: Any = None
    depth: int = 0
    inside: int = 0
    constructions: Sequence[Any] = ()
    path: tuple[str, ...] = ()


linen_calls = _LinenCalls()
nnx_calls = _NnxCalls()

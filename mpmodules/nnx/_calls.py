"""The nnx module calls, and the constructions of modules, that are under way."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from policy.core.precedence import Effective
from policy.core.provenance import Source


@dataclasses.dataclass
class Construction:
    """One construction: the source of its policy, whether it is captured yet, and the module."""

    source: Source
    captured: bool = False
    module: Any = None


class _Calls(threading.local):
    """The module calls and constructions under way in this thread.

    Attributes:
      depth: the number of calls.
      innermost: the module of the innermost call.
      inside: the number of calls in the innermost one so far.
      crossed: the boundaries below the outermost call, by class.
      constructions: the constructions, innermost last.
      note_run: is called with a layer in a trace of own code, and with the arguments and the
        outputs that it computes with; None where no summary is being made.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.innermost: Any = None
        self.inside = 0
        self.crossed: dict[str, Effective] = {}
        self.constructions: list[Construction] = []
        self.note_run: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None


calls = _Calls()


@contextlib.contextmanager
def call_under_way(module: Any) -> Iterator[Any]:
    """Notes the call of a module for a block; yields the module that calls it, or None."""
    outer, calls.innermost = calls.innermost, module
    inside, calls.inside = calls.inside, 0
    calls.depth += 1
    try:
        yield outer
    finally:
        calls.innermost, calls.inside = outer, inside + 1
        calls.depth -= 1
        if not calls.depth:
            calls.crossed.clear()


@contextlib.contextmanager
def construction_under_way(source: Source) -> Iterator[Construction]:
    """Notes the construction of a module for a block, whose policy comes from `source`."""
    construction = Construction(source)
    calls.constructions.append(construction)
    try:
        yield construction
    finally:
        calls.constructions.pop()


def is_under_construction(module: Any) -> bool:
    """Returns whether a module is being built: it has no policy before it is."""
    return any(construction.module is module for construction in calls.constructions)

"""The module calls under way in this thread: who is calling, and what is noted meanwhile.

Nothing here decides a dtype of its own: the policy in force is in the scope (`policy.core.scope`).
"""

from __future__ import annotations

import threading
from typing import Any


class _Calls(threading.local):
    """The calls of one wing under way in this thread.

    Attributes:
      recorded: what a summary records of calls, or None where none is being made.
    """

    def __init__(self) -> None:
        self.recorded: Any = None


class _LinenCalls(_Calls):
    """Those of linen modules.

    Attributes:
      innermost: the module of the innermost call.
      paths: those of the modules, the innermost last.
      root: the module of the root call.
      seen: the classes of the modules that the root call has seen so far, by path; None where no
        root call is under way.
      validates: whether Flax may run a setup to check it.
      adopters: those of `mpmodules.linen._adoption` in force, the innermost last.
      half_states: half-precision variables by the identities of the float32 ones that stand for
        them (`mpmodules.linen._half_states`).
      made: the half-precision variables that the calls made.
      traced: the name of the model or module whose call is the outermost of a trace for a report;
        "" where none is.
      traced_model: the same, where it is a whole model and no module of one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.innermost: Any = None
        self.paths: list[tuple[str, ...]] = []
        self.root: Any = None
        self.seen: dict[tuple[str, ...], set[type]] | None = None
        self.validates = True
        self.adopters: list[Any] = []
        self.half_states: dict[int, tuple[Any, Any]] = {}
        self.made: list[Any] = []
        self.traced = self.traced_model = ""


class _NnxCalls(_Calls):
    """Those of nnx modules, and the constructions of modules.

    Attributes:
      depth: the number of calls.
      inside: the number of calls in the innermost one so far.
      constructions: the constructions, the innermost last.
      path: that of the named module whose call is the innermost in a trace for a report.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = self.inside = 0
        self.constructions: list[Any] = []
        self.path: tuple[str, ...] = ()


linen_calls = _LinenCalls()
nnx_calls = _NnxCalls()

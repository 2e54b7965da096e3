"""Values of this thread that no program depends on: blocks under way, and what a report collects.

Values that change programs are in the scope (`policy.core.scope`), which is a key of JAX's caches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any


class ThreadValues(threading.local):
    """Values that each thread has of its own: the attributes of a subclass."""

    @contextlib.contextmanager
    def noting(self, **values: Any) -> Iterator[None]:
        """Sets attributes for a block."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class _Thread(ThreadValues):
    """The values of a thread.

    Attributes:
      blocks: the `use_policy` and `full_precision` blocks under way, innermost last.
      names_models: whether printed paths begin with a model's name (`policy.programs.paths`).
      keeps_lines: whether a trace keeps the source line of each equation
        (`policy.programs.rewriting.outlining`).
      wide: results of the trace under way that were float32 before, or None
        (`policy.programs.marks`).
      asked: the dtypes that a report collects, or None (`policy.core.precedence`).
      traced_dtype: that of the second trace under way, or None (`policy.autocasting.requests`).
      states: results of the last traced call that are state, such as caches
        (`policy.autocasting.own_code`).
      is_summary: whether a summary records the calls under way.
      autocast: the policy that the autocast whose function is traced was given, or None.
      backend: the platform and kind of the devices to trace for, or None for the default ones
        (`policy.core.dtypes`).
      shared_operands: operands in 8 bits by their identities, or None
        (`policy.eight_bits.scaled_matmul`).
      scaled_losses: the scales that multiplied a traced loss (`policy.grads.loss_scale`).
    """

    names_models = False
    keeps_lines = False
    wide: list[Any] | None = None
    asked: Any = None
    traced_dtype: Any = None
    is_summary = False
    states: Sequence[Any] = ()
    autocast: Any = None
    backend: tuple[str, str] | None = None
    shared_operands: dict[Any, Any] | None = None

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.scaled_losses: dict[Hashable, Any] = {}


thread = _Thread()
during = thread.noting
"""Sets values of this thread for a block."""

"""Provenance of policies, for summaries. It decides nothing and doesn't distinguish programs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Literal

ProvenanceKind = Literal["argument", "rule", "enclosing module", "scope", "global", "none"]


@dataclasses.dataclass(frozen=True)
class Source:
    """The provenance of a module's policy.

    Sources compare equal if their `own` is equal: the rest is for people, and the structure of a
    model must not depend on it.

    Attributes:
      kind: the origin of the policy.
      detail: the argument's name, the rule's pattern, or the enclosing module's path.
      own: whether the module itself has the policy, by an argument or a rule, rather than
        inheriting it.
      dtypes: dtype arguments that override the policy, as ``dtype=float32``.
    """

    kind: ProvenanceKind = dataclasses.field(compare=False)
    detail: str = dataclasses.field(default="", compare=False)
    own: bool = False
    dtypes: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        source = f"{self.kind}: {self.detail}" if self.detail else self.kind
        return f"argument: {self.dtypes}; else {source}" if self.dtypes else source

    def for_those_inside(self, where: str) -> Source:
        """Returns the source for a module that inherits the policy inside the module at `where`."""
        if self.kind == "argument" or self.dtypes:
            return Source("enclosing module", where)
        return dataclasses.replace(self, own=False)


NO_SOURCE = Source("none")
GLOBAL = Source("global")


class _InForce(threading.local):
    """The source of the policy in force in this thread.

    Outside of every block it can only be the global policy.
    """

    source = GLOBAL


_in_force = _InForce()


def source_in_force() -> Source:
    """Returns the source of the policy in force in this thread, if there is one."""
    return _in_force.source


@contextlib.contextmanager
def coming_from(source: Source) -> Iterator[None]:
    """Sets the source of the policy in force for the duration of a block."""
    outer, _in_force.source = _in_force.source, source
    try:
        yield
    finally:
        _in_force.source = outer

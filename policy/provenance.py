"""Where a policy comes from: what summaries show beside it. It decides nothing, and tells no two programs apart."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Literal

Kind = Literal["argument", "rule", "enclosing module", "scope", "global", "none"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the policy of a module comes from.

    Sources compare equal where `own` does: what they say is for people, and a model's structure must not differ by it.

    Attributes:
      kind: what gave the policy.
      detail: the argument's name, the rule's pattern, or the enclosing module's path.
      own: whether the module itself carries the policy, by an argument or a rule, rather than inheriting it.
      dtypes: dtype arguments that hold against the policy, as ``dtype=float32``.
    """

    kind: Kind = dataclasses.field(compare=False)
    detail: str = dataclasses.field(default="", compare=False)
    own: bool = False
    dtypes: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        source = f"{self.kind}: {self.detail}" if self.detail else self.kind
        return f"argument: {self.dtypes}; else {source}" if self.dtypes else source

    def for_those_inside(self, where: str) -> Source:
        """What a module inside of one at `where` says, when it inherits."""
        if self.kind == "argument" or self.dtypes:
            return Source("enclosing module", where)
        return dataclasses.replace(self, own=False)


NO_SOURCE = Source("none")
GLOBAL = Source("global")


class _InForce(threading.local):
    """What gave the policy in force in this thread; outside of every block it can only be the global one."""

    source = GLOBAL


_in_force = _InForce()


def source_in_force() -> Source:
    """What gave the policy that is in force in this thread, if one is."""
    return _in_force.source


@contextlib.contextmanager
def coming_from(source: Source) -> Iterator[None]:
    """Notes what gives the policy that is in force for the length of a block."""
    outer, _in_force.source = _in_force.source, source
    try:
        yield
    finally:
        _in_force.source = outer

"""The dtypes that rules, policies and arguments ask layers to compute in while a program is traced for a report."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from policy._jaxpr.paths import Path, divided, once
from policy.policy import Policy
from policy.rules import PolicyRules


@dataclasses.dataclass
class Asked:
    """The dtypes asked for in one trace.

    Attributes:
      policy: the policy around the trace, or None.
      rules: the rules around it, or None.
      has_policies: whether a module or function obeyed a policy in it.
      obeyed: the compute dtypes of modules that obey a policy, by model and path.
      given: the dtypes that layers were given as arguments, likewise.
    """

    policy: Policy | None = None
    rules: PolicyRules | None = None
    has_policies: bool = False
    obeyed: dict[tuple[str, str], set[np.dtype]] = dataclasses.field(default_factory=dict)
    given: dict[tuple[str, str], set[np.dtype]] = dataclasses.field(default_factory=dict)

    def is_wide(self, path: Path) -> bool:
        """Returns whether float32 or wider was asked for at a path: of the innermost module that was asked anything."""
        model, below = divided(path) or ("", path)
        below = once(below)
        for length in range(len(below), -1, -1):
            dtypes = self._at(model, "/".join(below[:length]))
            if dtypes:
                return any(dtype.itemsize >= 4 for dtype in dtypes)
        return self.policy is not None and self.policy.compute_dtype.itemsize >= 4

    def _at(self, model: str, path: str) -> set[np.dtype] | None:
        for noted in (self.obeyed, self.given):
            found = noted.get((model, path)) or noted.get(("", path))
            if found:
                return found
        # Nothing is noted of what was traced before, and rules hold there all the same.
        policy = None if self.rules is None else self.rules.match(path, model=model)
        return None if policy is None else {policy.compute_dtype}


_asked: contextvars.ContextVar[Asked | None] = contextvars.ContextVar("asked", default=None)


@contextlib.contextmanager
def collecting(policy: Policy | None, rules: PolicyRules | None) -> Iterator[Asked]:
    """Collects what is asked for in a block, in this thread."""
    asked = Asked(policy, rules, has_policies=policy is not None)
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def note_obeyed(model: str, path: str, policy: Policy | None) -> None:
    """Notes the policy that a module obeys in a call, where that is collected."""
    asked = _asked.get()
    if asked is not None and policy is not None:
        asked.has_policies = True
        asked.obeyed.setdefault((model, path), set()).add(policy.compute_dtype)


def note_given(model: str, path: str, dtype: Any) -> None:
    """Notes the dtype that a layer was given as an argument, where that is collected."""
    asked = _asked.get()
    if asked is not None and dtype is not None:
        asked.given.setdefault((model, path), set()).add(np.dtype(dtype))

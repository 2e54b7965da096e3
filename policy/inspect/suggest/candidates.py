"""The paths that rules can name."""

from __future__ import annotations

from policy.core.rules import PolicyRules
from policy.programs.paths import Path, divided, joined, once


class ListeningRules(PolicyRules):
    """Rules without effect that record the paths of the modules that look up their rules."""

    __slots__ = ("heard",)
    heard: set[str]

    def __init__(self) -> None:
        super().__init__([("(?!)", "float32")], strict=False)
        object.__setattr__(self, "heard", set())

    def rule_for(self, path: str | None, cls: type | None = None, *, model: str = "") -> None:
        if path is not None:
            self.heard.add(path)


def reached_path(path: Path, modules: set[str] | None) -> Path:
    """Returns the innermost path that a rule can name.

    If layers obey the rules, it is a module, not a scope inside one.
    """
    while modules is not None and path:
        model = divided(path)
        if model is not None and joined(once(model[1])) in modules:
            return path
        path = path[:-1]
    return path

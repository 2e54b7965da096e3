"""The choice of the numbers that a monitored step keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from policy.core.rules import PolicyRules
from policy.inspect.monitor.snapshot import KINDS, Kind
from policy.programs.paths import Path, divided, joined


class Keep:
    """Rules from the paths of modules to the kinds of numbers that are kept of them.

    Args:
      rules: kinds by pattern, as in `PolicyRules`; None keeps everything.

    Raises:
      TypeError: `rules` is no mapping from texts to kinds.
      ValueError: a kind is unknown, or a pattern is no regular expression.
    """

    def __init__(self, rules: Mapping[str, Kind | Collection[Kind]] | None):
        if rules is not None and not isinstance(rules, Mapping):
            raise TypeError(
                "keep should be a mapping from patterns of module paths to kinds, such as "
                f"{{'decoder/.*': ('activation', 'update')}}, but got {rules!r}."
            )
        self._kinds: dict[Any, frozenset[str]] = {}
        for pattern, kinds in (rules or {}).items():
            found = frozenset((kinds,) if isinstance(kinds, str) else kinds)
            if unknown := sorted(found.difference(KINDS), key=str):
                raise ValueError(
                    f"keep[{pattern!r}] has the unknown kind {', '.join(map(repr, unknown))}. "
                    f"Kinds are {', '.join(KINDS)}."
                )
            self._kinds[pattern] = found
        self._rules = None if rules is None else PolicyRules(dict.fromkeys(rules, "float32"))
        self._seen: dict[tuple[str, str], None] = {}

    def __call__(self, path: Path, kind: Kind) -> bool:
        """Returns whether numbers of a kind are kept of the module at a path."""
        if self._rules is None:
            return True
        model, below = divided(path) or ("", path)
        self._seen[joined(below), model] = None
        for count in range(len(below), -1, -1):
            if rule := self._rules.rule_at(below[:count], model=model):
                return kind in self._kinds[rule[0]]
        return False

    def of_leaf(self, path: str, kind: Kind) -> bool:
        """Returns whether numbers of a kind are kept of an array at a path."""
        names = path.split("/")
        module = names[:-1] if kind != "input" else names
        return self(tuple(module[1:] if module[:1] == ["params"] else module), kind)

    def check(self) -> None:
        """Raises ValueError if a pattern matched nothing."""
        if self._rules is not None:
            self._rules.check_places(self._seen)

"""The paths that rules can name, and rules for them: few, matching no other candidates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from policy.core.rules import PolicyRules
from policy.inspect.traced.call import short_text
from policy.programs.paths import Path, divided, joined, once, spelled


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

    def rule_at(self, names: Path, cls: type | None = None, *, model: str = "") -> None:
        self.rule_for(joined(names), cls, model=model)


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


def patterns_of(
    is_wide: Mapping[Path, bool], modules: set[str] | None = None
) -> list[tuple[str, bool]]:
    """Returns patterns of the paths in float32, and of those in half precision inside of them.

    A rule applies to everything below the path that it matches, until another rule matches there.

    Args:
      is_wide: for each path that matters, whether it is in float32.
      modules: the paths that rules can name; None for all.

    Returns:
      Pairs of a pattern, and whether what it matches is in float32.
    """
    prefixes = {path[:n] for path in is_wide for n in range(1, len(path) + 1)}
    ruled: dict[Path, bool] = {}  # the paths of rules, outermost first
    for path in sorted(prefixes, key=lambda path: (len(path), path)):
        outer = [ruled[path[:n]] for n in range(1, len(path)) if path[:n] in ruled]
        below = [wide for other, wide in is_wide.items() if other[: len(path)] == path]
        if path in is_wide:
            wide = is_wide[path]
        elif len(below) > 1 and all(below) and reached_path(path, modules) == path:
            wide = True  # of a name with a "/" the first part may be no module
        else:
            continue
        if wide != (outer[-1] if outer else False):
            ruled[path] = wide
    by_name = {spelled(path): wide for path, wide in ruled.items()}
    return list(_folded(by_name, set(map(spelled, prefixes))))


def _folded(ruled: Mapping[str, bool], known: set[str]) -> Iterable[tuple[str, bool]]:
    """Joins paths that differ only in numbers into one pattern, if it matches no other path."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, wide in ruled.items():
        groups.setdefault((re.sub(r"\d+", "#", name), wide), []).append(name)
    for (template, wide), names in groups.items():
        pattern = r"\d+".join(map(re.escape, template.split("#")))
        matched = {name for name in known if re.fullmatch(pattern, name)}
        if len(names) > 1 and matched == set(names):
            yield pattern, wide
        else:
            yield from ((re.escape(name), wide) for name in names)


def code_of(rules: Iterable[tuple[Any, Any]]) -> str:
    """Returns rules, pairs of a pattern and a policy, as Python code."""
    lines = [f"    ({_quoted(str(p))}, {_quoted(short_text(policy))})," for p, policy in rules]
    return "PolicyRules([\n" + "\n".join(lines) + "\n])" if lines else "PolicyRules([])"


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'

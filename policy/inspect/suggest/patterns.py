"""The paths that rules can name, and rules for them: few, matching no other candidates."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from policy.core.rules import PolicyRules
from policy.inspect.traced.call import short_text
from policy.programs.paths import Path, divided, joined, once, spelled

S = TypeVar("S", bound=Hashable)


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
    states: Mapping[Path, S], default: S, modules: set[str] | None = None
) -> list[tuple[str, S]]:
    """Returns the rules that give each path its state, as pairs of a pattern and a state.

    A rule applies to everything below the path that it matches, until another rule matches there.

    Args:
      states: of all paths that matter.
      default: the state that paths have without a rule.
      modules: the paths that rules can name; None for all.
    """
    prefixes = {path[:n] for path in states for n in range(1, len(path) + 1)}
    said: dict[Path, S] = {}  # the path and state of each rule, outermost first
    for path in sorted(prefixes, key=lambda path: (len(path), path)):
        outer = [said[path[:n]] for n in range(1, len(path)) if path[:n] in said]
        below = [state for other, state in states.items() if other[: len(path)] == path]
        if path in states:
            state = states[path]
        elif len(below) > 1 and below[0] != default and all(one == below[0] for one in below):
            # of a name with a "/" the first part may be no module
            if reached_path(path, modules) != path:
                continue
            state = below[0]
        else:
            continue
        if state != (outer[-1] if outer else default):
            said[path] = state
    by_name = {spelled(path): state for path, state in said.items()}
    return list(_folded(by_name, set(map(spelled, prefixes))))


def _folded(said: Mapping[str, S], known: set[str]) -> Iterable[tuple[str, S]]:
    """Joins paths that differ only in numbers into one pattern, if it matches no other path."""
    groups: dict[tuple[str, S], list[str]] = {}
    for name, state in said.items():
        groups.setdefault((re.sub(r"\d+", "#", name), state), []).append(name)
    for (template, state), names in groups.items():
        pattern = r"\d+".join(map(re.escape, template.split("#")))
        matched = {name for name in known if re.fullmatch(pattern, name)}
        if len(names) > 1 and matched == set(names):
            yield pattern, state
        else:
            yield from _alternatives(names, state)


def _alternatives(names: list[str], state: S) -> Iterable[tuple[str, S]]:
    """Yields a pattern for three or more paths that differ in one number.

    An example is ``layer_(?:3|7|9)/Dense_0``. Other paths each have their own pattern.
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    differing = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(names) < 3 or len(differing) != 1:
        yield from ((re.escape(name), state) for name in names)
        return
    (i,) = differing
    before, after = ("".join(map(re.escape, part)) for part in (parts[0][:i], parts[0][i + 1 :]))
    yield f"{before}(?:{'|'.join(part[i] for part in parts)}){after}", state


def code_of(rules: Iterable[tuple[Any, Any]]) -> str:
    """Returns rules, pairs of a pattern and a policy, as Python code."""
    lines = [f"    ({_quoted(str(p))}, {_quoted(short_text(policy))})," for p, policy in rules]
    return "PolicyRules([\n" + "\n".join(lines) + "\n])" if lines else "PolicyRules([])"


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'

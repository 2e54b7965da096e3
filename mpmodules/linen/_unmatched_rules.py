"""The check that every rule in force met a module in a root's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.tracing.linen_names import model_name
from policy.core.rules import PolicyRules
from policy.programs.paths import joined


def check_rules(root: Any, rules: PolicyRules) -> None:
    """Checks the rules in force against the modules called and those that hold variables.

    Class rules are checked only where every module that holds variables was called: a call of one
    method of many, or of a cached inner jit, says nothing about the classes of the rest.
    """
    if not rules.strict or calls.seen is None:
        return
    seen: dict[str, set[type]] = {}
    for path, classes in calls.seen.items():
        seen.setdefault(joined(path), set()).update(classes)
    stored: set[str] = set()
    for collection in root.variables.values():
        _collect_paths(collection, (), stored)
    wholes = [
        path
        for path, classes in seen.items()
        if any(getattr(cls, "_is_whole", False) for cls in classes)
    ]
    inside = tuple(f"{path}/" if path else "" for path in wholes)

    def can_obey(path: str) -> bool:
        return path in wholes or not path.startswith(inside)

    called = {path: classes for path, classes in seen.items() if can_obey(path)}
    stored = set(filter(can_obey, stored))
    paths: dict[str, Any] = dict.fromkeys(stored) | called
    model = model_name(root)
    rules = rules.of_model(model)  # others may be meant for another model in the block
    rules.check(paths if stored <= set(called) else list(paths), model=model)


def _collect_paths(tree: Any, path: tuple[str, ...], into: set[str]) -> None:
    """Adds the path of each mapping below `tree` that holds something, prefixes included."""
    if isinstance(tree, Mapping):
        into.add(joined(path))
        for name, child in tree.items():
            _collect_paths(child, (*path, str(name)), into)

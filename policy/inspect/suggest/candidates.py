"""The paths that rules can name."""

from __future__ import annotations

from policy.programs.paths import Path, divided, once


def reached_path(path: Path, modules: set[str] | None) -> Path:
    """Returns the innermost path that a rule can name.

    If layers obey the rules, it is a module, not a scope inside one.
    """
    while modules is not None and path:
        model = divided(path)
        if model is not None and "/".join(once(model[1])) in modules:
            return path
        path = path[:-1]
    return path

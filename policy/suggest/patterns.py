"""Rules for a set of module paths: as few as possible, matching no other candidates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from policy._jaxpr.paths import Path, spelled

PathPattern = tuple[str, bool]  # a pattern, and whether the paths that it matches run in float32


def patterns_of(wide: frozenset[Path], candidates: Iterable[Path]) -> list[PathPattern]:
    """Returns the rules that leave exactly `wide` of the candidates in float32.

    A rule applies to everything below the path that it matches, until another rule matches there.

    Args:
      wide: the paths to run in float32.
      candidates: all paths whose dtype matters, including `wide`.

    Returns:
      Pairs of a pattern and whether its paths run in float32.
    """
    every = set(candidates)
    prefixes = {path[:n] for path in every for n in range(1, len(path) + 1)}
    said = _said(wide, every, prefixes)
    return list(
        _folded({spelled(path): state for path, state in said.items()}, set(map(spelled, prefixes)))
    )


def _said(wide: frozenset[Path], every: set[Path], prefixes: set[Path]) -> dict[Path, bool]:
    """Returns the path and dtype of each rule, outermost first."""
    said: dict[Path, bool] = {}
    for path in sorted(prefixes, key=lambda path: (len(path), path)):
        inherited = next(
            (said[path[:n]] for n in range(len(path) - 1, 0, -1) if path[:n] in said), False
        )
        below = {other for other in every if other[: len(path)] == path}
        if path in every:
            state = path in wide
        elif len(below) > 1 and below <= wide:
            state = True
        else:
            continue
        if state != inherited:
            said[path] = state
    return said


def _folded(said: Mapping[str, bool], known: set[str]) -> Iterable[PathPattern]:
    """Joins paths that differ only in numbers into one pattern, if it matches no other path."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, state in said.items():
        groups.setdefault((re.sub(r"\d+", "#", name), state), []).append(name)
    for (template, state), names in groups.items():
        pattern = "".join(
            r"\d+" if part == "#" else re.escape(part) for part in re.split("(#)", template)
        )
        matched = {name for name in known if re.fullmatch(pattern, name)}
        if len(names) > 1 and matched == set(names):
            yield pattern, state
        else:
            yield from _alternatives(names, state)


def _alternatives(names: list[str], state: bool) -> Iterable[PathPattern]:
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


def code_of(pairs: Iterable[tuple[str, Any]]) -> str:
    """Returns the rules as Python code."""
    lines = [f"    ({_quoted(pattern)}, {_quoted(str(policy))})," for pattern, policy in pairs]
    return "PolicyRules([\n" + "\n".join(lines) + "\n])" if lines else "PolicyRules([])"


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'

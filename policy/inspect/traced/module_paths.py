"""Module paths as reports and rules have them: without scopes that are no modules."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from policy.programs.marks import BOUNDARY, ISLAND
from policy.programs.paths import Path

_SCOPES = frozenset((BOUNDARY, ISLAND))  # of ours: no modules


def module_path(path: Path, is_backward: bool) -> Path:
    """Returns a path without scopes that are not modules.

    The transposition of checkpoints and derivative rules repeats a part of the path of their
    equations: Net/Net for Net, layers/norm/layers/norm for layers/norm.
    """
    path = tuple(name for name in path if name not in _SCOPES)
    return _once(path) if is_backward else path


@functools.lru_cache(maxsize=4096)
def _once(path: Path) -> Path:
    for length in range(len(path) // 2, 0, -1):
        for start in range(len(path) - 2 * length + 1):
            middle, end = start + length, start + 2 * length
            is_numbers = all(map(str.isdigit, path[start:middle]))
            if path[start:middle] == path[middle:end] and not is_numbers:
                return _once((*path[:middle], *path[end:]))
    return path


def lost_prefixes(paths: Iterable[Path]) -> dict[Path, Path]:
    """Returns the full path of each path whose beginning was lost.

    JAX hoists loop-invariant equations out of a differentiated scan, and then names them by their
    path within the body: such a path is the end of exactly one other.
    """
    every = set(paths)
    ends: dict[Path, list[Path]] = {}
    for path in every:
        for start in range(1, len(path)):
            ends.setdefault(path[start:], []).append(path)
    return {end: found[0] for end, found in ends.items() if end in every and len(found) == 1}

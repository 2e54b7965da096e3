"""Names of modules on JAX's name stacks that could be taken for something else.

`a.b` is a module, or the method `b` of `a`, and `a/b` is one module, or `b` in `a`: frameworks
write both alike. Module names that are not identifiers are therefore noted when a call is traced or
its arguments hold keys of that name. Every other text with a dot is a method's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from policy.programs.frameworks import FRAMEWORKS
from policy.programs.thread import during


def parts_of_name(name: str) -> tuple[str, ...]:
    """Returns the parts that slashes divide a module's name into."""
    return tuple(filter(None, name.split("/")))


class _Names:
    """A set of names, each held as its parts."""

    def __init__(self) -> None:
        self._by_first: dict[str, set[tuple[str, ...]]] = {}

    def __contains__(self, name: str) -> bool:
        parts = parts_of_name(name)
        return parts in self._by_first.get(parts[0], ()) if parts else False

    def add(self, name: str) -> None:
        if parts := parts_of_name(name):
            self._by_first.setdefault(parts[0], set()).add(parts)

    def clear(self) -> None:
        self._by_first.clear()

    def first_of(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the longest name that a path begins with; () without one."""
        found = (name for name in self._by_first.get(path[0], ()) if path[: len(name)] == name)
        return max(found, key=len, default=())


_noted = _Names()
# Names of whole models on name stacks: those of their classes, or those that they were given.
_roots = _Names()
_repeated = _Names()  # names of modules that stand directly in one of the same name
_version = 0  # of all of these

_METHOD = re.compile(r"([^.]+)\.([A-Za-z_]\w*|<lambda>)")
# Names that JAX gives to einsums and to functions without a name.
_UNNAMED = re.compile(r"[\w.,\s]*->[\w.\s]*|<.*>")


def note(name: str) -> None:
    """Notes the name of a module, and the parts that slashes divide it into."""
    for text in (name, *parts_of_name(name)):
        if not text.isidentifier():
            _add(text, _noted)


def note_root(name: str) -> None:
    """Notes the name of a whole model, with which the name stacks of its operations begin."""
    _add(name, _roots)


def note_repeated(names: tuple[str, ...]) -> None:
    """Notes the names that stand twice in a row: those of a module and of the one around it."""
    pairs = itertools.pairwise(names), itertools.pairwise(parts_of_name("/".join(names)))
    for outer, name in itertools.chain(*pairs):
        if outer == name:
            _add(name, _repeated)


def _add(name: str, names: _Names) -> None:
    global _version
    if name not in names:
        names.add(name)
        _version += 1


def forget() -> None:
    """Forgets every name, as where a process starts: for tests, which share one."""
    global _version
    for names in (_noted, _roots, _repeated):
        names.clear()
    _version += 1


def is_root(name: str) -> bool:
    """Returns whether a name was noted as a whole model's."""
    return name in _roots


def root_at(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the parts of the whole model's name that a path begins with; () without one."""
    return _roots.first_of(path)


def module_at(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the parts of the module's name that a path begins with."""
    return _noted.first_of(path) or path[:1]


def is_repeated(name: str) -> bool:
    """Returns whether a module of that name was noted to stand in one of the same name."""
    return name in _repeated


def is_noted(name: str) -> bool:
    """Returns whether a text was noted as the name of a module."""
    return name in _noted


def noted() -> int:
    """Returns a number that changes where another name is noted.

    Readings of name stacks may change then.
    """
    return _version


def note_keys(treedef: Any) -> None:
    """Notes the keys of dicts in a tree, which name modules if it holds parameters."""
    with contextlib.suppress(TypeError):  # a tree whose static data have no hash
        _keys_of(treedef)


@functools.lru_cache(maxsize=64)
def _keys_of(treedef: Any) -> None:
    paths = jax.tree_util.tree_leaves_with_path(
        jax.tree.unflatten(treedef, range(treedef.num_leaves))
    )
    for key in {key for path, _ in paths for key in path if isinstance(key, jax.tree_util.DictKey)}:
        if isinstance(key.key, str):
            note(key.key)


def make_jaxpr(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Acts as `jax.make_jaxpr`, and notes the names of the modules that `function` calls.

    The source lines of their operations are kept.
    """

    @functools.wraps(function)
    def noting(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(during(keeps_lines=True))
            for framework in FRAMEWORKS:
                stack.enter_context(framework.noting_modules())
            return function(*args)

    return jax.make_jaxpr(noting, **options)


def module_and_method(scope: str, around: Iterable[str]) -> tuple[str, str]:
    """Returns the module and the method that a scope names; "" for either if there is none.

    Args:
      scope: a component of a name stack.
      around: the names that it stands in. Modules with methods stand in one that is named after its
        class.
    """
    if is_noted(scope):
        return scope, ""
    method = _METHOD.fullmatch(scope)
    if method is not None and any(name[:1].isupper() for name in (*around, scope)):
        return method[1], method[2]
    return ("", "") if _UNNAMED.fullmatch(scope) else (scope, "")

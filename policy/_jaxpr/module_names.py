"""Names of modules on JAX's name stacks that could be taken for something else: `a.b` is a module,
or a method of `a`.

Frameworks write both alike. So module names that are no identifiers are noted, where a call is
traced or its arguments hold keys of that name, and every other text with a dot is a method's.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax

_noted: set[str] = set()
_roots: set[str] = (
    set()
)  # what whole models are called on name stacks: by their classes, or by the names they were given
_repeated: set[str] = set()  # what modules are called that stand directly in one of the same name

# Contexts in which frameworks note the names of the modules that are called.
NOTING: list[Callable[[], AbstractContextManager[Any]]] = []

_METHOD = re.compile(r"([^.]+)\.([A-Za-z_]\w*|<lambda>)")
# What JAX calls einsums and functions without a name.
_UNNAMED = re.compile(r"[\w.,\s]*->[\w.\s]*|<.*>")


def note(name: str) -> None:
    """Notes the name of a module."""
    if not name.isidentifier():
        _noted.add(name)


def note_root(name: str) -> None:
    """Notes the name of a whole model, which begins the name stacks of what it computes."""
    _roots.add(name)


def note_repeated(name: str) -> None:
    """Notes that a module is called what the module or model around it is called."""
    _repeated.add(name)


def is_root(name: str) -> bool:
    """Returns whether a name was noted as a whole model's."""
    return name in _roots


def is_repeated(name: str) -> bool:
    """Returns whether a module of that name was noted to stand in a module or model of the same
    name.
    """
    return name in _repeated


def is_noted(name: str) -> bool:
    """Returns whether a text is the name of a module that was noted."""
    return name in _noted


def noted() -> int:
    """Returns a number that changes where a name was noted: what is read from name stacks may
    change then.
    """
    return len(_noted) + len(_roots) + len(_repeated)


def note_keys(treedef: Any) -> None:
    """Notes the keys of dicts in a tree, which are those of its modules where it holds parameters."""
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
    """`jax.make_jaxpr`, which notes the names of the modules that `function` calls."""

    @functools.wraps(function)
    def noting(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context in NOTING:
                stack.enter_context(context())
            return function(*args)

    return jax.make_jaxpr(noting, **options)


def module_and_method(scope: str, around: Iterable[str]) -> tuple[str, str]:
    """Returns the name of the module that a scope names, "" for none, and that of its method, ""
    where none is named.

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

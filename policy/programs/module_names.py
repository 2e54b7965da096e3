"""Names of modules on JAX's name stacks that could be taken for something else.

`a.b` is a module, or the method `b` of `a`: frameworks write both alike. Module names that are not
identifiers are therefore noted when a call is traced or its arguments hold keys of that name. Every
other text with a dot is a method's.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax

from policy.programs.frameworks import FRAMEWORKS
from policy.programs.thread import during

_noted: set[str] = set()
# Names of whole models on name stacks: those of their classes, or those that they were given.
_roots: set[str] = set()
_repeated: set[str] = set()  # names of modules that stand directly in one of the same name
_version = 0  # of all of these

_METHOD = re.compile(r"([^.]+)\.([A-Za-z_]\w*|<lambda>)")
# Names that JAX gives to einsums and to functions without a name.
_UNNAMED = re.compile(r"[\w.,\s]*->[\w.\s]*|<.*>")


def note(name: str) -> None:
    """Notes the name of a module."""
    if not name.isidentifier():
        _add(name, _noted)


def note_root(name: str) -> None:
    """Notes the name of a whole model, with which the name stacks of its operations begin."""
    _add(name, _roots)


def note_repeated(name: str) -> None:
    """Notes that a module has the name of the module or model around it."""
    _add(name, _repeated)


def _add(name: str, names: set[str]) -> None:
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

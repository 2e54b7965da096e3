"""Module paths, read from JAX's name stacks, and the names that frameworks note for it.

`a.b` is a module, or the method `b` of `a`, and `a/b` is one module, or `b` in `a`: frameworks
write both alike. Module names that are not identifiers are therefore noted when a call is traced or
its arguments hold keys of that name. Every other text with a dot is a method's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from policy.programs.jaxprs import OpenJaxpr, programs_of
from policy.programs.marks import AUTOCAST, REGION
from policy.programs.thread import during, thread

Path = tuple[str, ...]


def parts_of_name(name: str) -> Path:
    """Returns the parts that slashes divide a module's name into."""
    return tuple(filter(None, name.split("/")))


# Names, each held as its parts. Those of whole models are the names of their classes, or those that
# they were given; repeated ones are of modules that stand directly in one of the same name.
_noted: set[Path] = set()
_roots: set[Path] = set()
_repeated: set[Path] = set()
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


def _add(name: str, names: set[Path]) -> None:
    global _version
    parts = parts_of_name(name)
    if parts and parts not in names:
        names.add(parts)
        _version += 1


def forget() -> None:
    """Forgets every name, as where a process starts: for tests, which share one."""
    global _version
    for names in (_noted, _roots, _repeated):
        names.clear()
    _version += 1


def _longest(names: set[Path], path: Path) -> Path:
    """Returns the longest name that a path begins with; () without one."""
    lengths = range(len(path), 0, -1) if names else ()
    return next((path[:length] for length in lengths if path[:length] in names), ())


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


def module_and_method(scope: str, around: Iterable[str]) -> tuple[str, str]:
    """Returns the module and the method that a scope names; "" for either if there is none.

    Args:
      scope: a component of a name stack.
      around: the names that it stands in. Modules with methods stand in one that is named after its
        class.
    """
    if parts_of_name(scope) in _noted:
        return scope, ""
    method = _METHOD.fullmatch(scope)
    if method is not None and any(name[:1].isupper() for name in (*around, scope)):
        return method[1], method[2]
    return ("", "") if _UNNAMED.fullmatch(scope) else (scope, "")


# Wrappers that JAX's transformations put around names. Under a derivative the names start again at
# the root.
_RESTARTING = frozenset(("jvp", "transpose", "linearize"))
_FUNCTIONS = frozenset(
    ("jit", "pjit", "custom_jvp", "custom_vjp", "shard_map", "pmap", "core_call", "closed_call")
)
_OPENING = re.compile(
    rf"(?:(?:{'|'.join(sorted(_RESTARTING | _FUNCTIONS | {'vmap', 'remat'}))})\()+"
)
# Names that are no module's.
_OF_JAX = frozenset(("checkpoint", "rematted_computation"))
# A module that flax.linen named: twice in a row it is one whose call calls its base class's.
_NUMBERED = re.compile(r"[A-Z]\w*_\d+")
# A class, as a model's name on the stack is one. Modules inside of a model that are named after
# classes are numbered.
_CLASS = re.compile(r"[A-Z]\w*")
# Places in lists, and the counters that end names: `layers/3`, `Dense_0`. Not folded ones, `0..29`.
_NUMBERS = re.compile(r"(?<![^/_])(?:0|[1-9]\d*)(?![^/])")
_MARK = re.compile(rf"{REGION}\w+/?")


def joined(names: Iterable[str]) -> str:
    """Returns the path of modules' names as rules match it: ``encoder/layer_0``.

    A slash in a name divides it as it divides names, and nothing stands between two in a row.
    """
    return "/".join(parts_of_name("/".join(names)))


def path_of(name_stack: str, above: Path = (), *, marks: bool = False) -> Path:
    """Returns the module path in a name stack, as flax.linen and `jax.named_scope` write it.

    A name may hold any characters; a slash in one divides it as it divides names.

    Args:
      name_stack: ``str(eqn.source_info.name_stack)``, e.g. ``transpose(jvp(Net))/layer_1/Dense_0``.
      above: the path of the equation whose body this one stands in: name stacks inside of it are
        relative to it.
      marks: whether the marks of `policy.programs.marks` are in the path.
    """
    if REGION in name_stack and not marks:
        name_stack = _MARK.sub("", name_stack)
    return _path_of(name_stack, above, noted())


@functools.lru_cache(maxsize=4096)
def _path_of(name_stack: str, above: Path, _version: int) -> Path:
    path, left = (), _names_of(name_stack, above)
    while left:  # `a/b/a/b` is one module, if `a/b` is: its call calls its base class's
        name = _longest(_noted, left) or left[:1]
        is_again = len(name) > 1 and path[-len(name) :] == name and name not in _repeated
        path, left = path if is_again else (*path, *name), left[len(name) :]
    return path


def _names_of(name_stack: str, above: Path) -> Path:
    path: list[str] = []
    restarted = False
    for wrappers, scopes in _parts(name_stack):
        if _FUNCTIONS.intersection(wrappers):
            scopes = ""
        for _ in _RESTARTING.intersection(wrappers):
            if not path or module_and_method(scopes.split("/")[0], ())[0] == path[0]:
                path, restarted = [], True  # else it is a module that takes a derivative itself
        for scope in filter(None, scopes.split("/")):
            module, method = module_and_method(scope, (*above, *path))
            if module and module not in _OF_JAX and module != AUTOCAST:
                is_root_again = len(path) == 1 and parts_of_name(module) not in _repeated
                is_same_call = path[-1:] == [module] and (
                    method or is_root_again or _NUMBERED.fullmatch(module)
                )
                path += [] if is_same_call else [module]
    if not above or (path and path[0] == above[0]):
        return tuple(path)
    if restarted and not path:
        return above
    if path and path[0] == above[-1]:
        path = path[1:]
    return (*above, *path)


def divided(path: Path) -> tuple[str, Path] | None:
    """Returns the name of a path's model, and the path below it; None outside of any model.

    A path begins with its model's name: that of its class, or the one that a linen model was given.
    Scopes that were opened around the call of a model stand before it, and are no part of the
    model.
    """
    if path and _CLASS.fullmatch(path[0]) and not _NUMBERED.fullmatch(path[0]):
        return path[0], path[1:]
    for place in range(len(path)):
        if root := _longest(_roots, path[place:]):
            return joined(root), path[place + len(root) :]
    return None


def naming(paths: Iterable[Path]) -> contextlib.AbstractContextManager[None]:
    """Lets `spelled` name models in a block, where `paths` lead into more than one."""
    models = {found[0] for path in set(paths) if (found := divided(path)) is not None}
    return during(names_models=len(models) > 1)


def spelled(path: Path) -> str:
    """Returns a path as reports print it and rules take it: ``encoder/layer_0``.

    It is "" outside of any module. A model itself is its name and a colon, ``Net:``. In a program
    of several models, see `naming`, its modules' paths begin with that, ``Net:encoder/layer_0``.
    """
    found = divided(path)
    if found is None:
        return joined(path)
    model, below = found[0], joined(once(found[1]))
    return below if below and not thread.names_models else f"{model}:{below}"


def once(below: Path) -> Path:
    """Returns a path with a name that stands twice in a row once: a module calls its base class's.

    Places in lists stay, and so does the name of a module that was noted to share that of the one
    around it.
    """
    return tuple(
        name
        for i, name in enumerate(below)
        if not i or name != below[i - 1] or name.isdigit() or parts_of_name(name) in _repeated
    )


def parts_of(text: str) -> list[str]:
    """Returns the names in a path as `spelled` writes it: ``["Net:", "encoder", "layer_0"]``."""
    model, colon, below = text.partition(":")
    if not colon or not (_CLASS.fullmatch(model) or parts_of_name(model) in _roots):
        return list(filter(None, text.split("/")))
    return [f"{model}:", *filter(None, below.split("/"))]


def scanned_path(body: OpenJaxpr, above: Path) -> Path:
    """Returns the path of a loop's body as a module: the common part of its equations' paths.

    Args:
      body: an open jaxpr.
      above: the path of the loop's equation.
    """
    paths = list(_paths(body, above))
    if not paths:
        return above
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return tuple(name for name, *_ in shared)


def _paths(body: OpenJaxpr, above: Path) -> Iterator[Path]:
    """Yields the paths of equations that stand below a path."""
    for equation in body.eqns:
        path = path_of(str(equation.source_info.name_stack), above)
        if len(path) > len(above):
            yield path
        else:
            for program in programs_of(equation):
                yield from _paths(program, path)


def folded(paths: Iterable[str]) -> list[str]:
    """Returns paths, those that differ in one number alone as one: ``layers/0..29/norm``.

    Numbers are places in lists and the counters at the ends of names; those that are not
    consecutive stay apart.
    """
    texts = list(dict.fromkeys(paths))
    for place in reversed(range(max((len(_NUMBERS.findall(text)) for text in texts), default=0))):
        families: dict[tuple[str, str], list[int]] = {}
        for text in texts:
            found = [*_NUMBERS.finditer(text)]
            if place < len(found):
                number = found[place]
                family = text[: number.start()], text[number.end() :]
                families.setdefault(family, []).append(int(number[0]))
            else:
                families[text, ""] = []
        texts = [
            text for family, numbers in families.items() for text in _members(*family, numbers)
        ]
    return texts


def _members(before: str, after: str, numbers: list[int]) -> list[str]:
    low, high = min(numbers, default=0), max(numbers, default=0)
    if len(numbers) > 2 and high - low == len(numbers) - 1:
        return [f"{before}{low}..{high}{after}"]
    return [f"{before}{number}{after}" for number in numbers] or [before + after]


def _parts(name_stack: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the parts of a name stack: wrappers, outermost first, and the names inside them."""
    start = 0
    while start < len(name_stack):
        slash = name_stack.find("/", start)
        end = len(name_stack) if slash < 0 else slash
        wrappers, inside = (), start
        if opening := _OPENING.match(name_stack, start):
            closing = re.compile(r"\)" * opening[0].count("(") + "(?=/|$)").search(
                name_stack, opening.end()
            )
            if closing and parts_of_name(name_stack[start : closing.end()]) not in _noted:
                wrappers = tuple(opening[0].split("(")[:-1])
                inside, end = opening.end(), closing.start()
        yield wrappers, name_stack[inside:end]
        start = end + len(wrappers) + 1

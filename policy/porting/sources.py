"""Files to port, parsed with LibCST, and the other files of their packages."""

from __future__ import annotations

import ast
import difflib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import metadata

from policy.porting import dtypes
from policy.porting.syntax import pairs


class PortError(ValueError):
    """A file that can't be ported; the message says why."""


_PROVIDERS = (metadata.ScopeProvider, metadata.ParentNodeProvider, metadata.PositionProvider)


class Nodes:
    """The scopes, imports, parents and lines of the nodes of some files.

    Args:
      files: the metadata of each, by provider.
    """

    def __init__(self, files: Sequence[Mapping[Any, Mapping[cst.CSTNode, Any]]]):
        joined: list[Any] = [{n: v for one in files for n, v in one[p].items()} for p in _PROVIDERS]
        self._scopes, self._parents, self._positions = joined

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line in the current text."""
        return self._positions[node].start.line

    def last_line(self, node: cst.CSTNode) -> int:
        return self._positions[node].end.line

    def code(self, node: cst.CSTNode) -> str:
        """Returns a node's text on one line."""
        return " ".join(self.full_text(node).split()).removesuffix(",")

    def full_text(self, node: cst.CSTNode) -> str:
        return _EMPTY.code_for_node(node)

    def parent(self, node: cst.CSTNode | None) -> Any:
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while (node := self.parent(node)) is not None:
            yield node

    def enclosing(self, node: cst.CSTNode, *types: type) -> Any:
        """Returns the innermost ancestor of one of the types, or None."""
        return next((a for a in self.ancestors(node) if isinstance(a, types)), None)

    def class_of(self, node: cst.CSTNode) -> str:
        """Returns the name of the class whose method or field a node is in, or ``""``."""
        return self.around(node, cst.ClassDef)

    def around(self, node: cst.CSTNode, *types: type) -> str:
        """Returns the name of the innermost definition of one of the types, or ``""``."""
        found = self.enclosing(node, *types)
        return found.name.value if found else ""

    def scopes(self) -> set[Any]:
        return {scope for scope in self._scopes.values() if scope is not None}

    def assignments(self, name: cst.Name) -> list[Any]:
        """Returns the bindings of a name, by LibCST's scopes; built-in names are left out."""
        scope = self._scopes.get(name)
        found = scope[name.value] if scope is not None else ()
        return [a for a in found if hasattr(a, "node")]

    def reads(self, target: cst.Name) -> list[cst.CSTNode]:
        """Returns the uses of a name from an assignment to the next one, by their lines."""
        line, bound = self.line(target), self.assignments(target)
        end = min((n for a in bound if (n := self.line(a.node)) > line), default=math.inf)
        uses = {access.node for a in bound for access in a.references}
        return [use for use in uses if line < self.line(use) <= end]

    def value_of(self, target: cst.CSTNode) -> cst.BaseExpression | None:
        """Returns the value that an assignment gives to a variable, or None."""
        statement = self.enclosing(target, cst.Assign, cst.AnnAssign, cst.SimpleStatementLine)
        return next((value for one, value, _ in pairs(statement) if one is target), None)

    def imported(self, node: cst.CSTNode) -> str:
        """Returns the dotted name of an import, as in ``jax.numpy.zeros``, or ``""``."""
        inner = node
        while isinstance(inner, cst.Attribute):
            inner = inner.value
        scope = self._scopes.get(node) if isinstance(inner, cst.Name) else None
        found = scope.get_qualified_names_for(node) if scope is not None else ()
        return next((one.name for one in found if one.source is _IMPORT), "")

    def name_of(self, module: str, node: cst.CSTNode) -> str | None:
        """Returns the name that a node's file imports a module by, or None."""
        scope = self._scopes[node].globals
        names = dict.fromkeys(one.name for one in scope.assignments)
        found = ((one.name, name) for name in names for one in scope.get_qualified_names_for(name))
        return next((name for full, name in found if full == module), None)


_IMPORT = metadata.QualifiedNameSource.IMPORT
_EMPTY = cst.Module([])


class ParsedFile(Nodes):
    """A parsed file.

    Args:
      path: of the file.
      text: its contents.
      lines: for each line of `text`, the line of the file as it is on disk, from 1.

    Raises:
      PortError: the text is not Python.
    """

    def __init__(self, path: Path, text: str, lines: Sequence[int] | None = None):
        self.path, self.text = path, text
        self.lines = lines or range(1, text.count("\n") + 3)
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        except cst.ParserSyntaxError as error:
            raise PortError(f"{path}:{error.raw_line}: not Python: {error.message}") from None
        self.module, self.metadata = wrapper.module, wrapper.resolve_many(_PROVIDERS)
        super().__init__([self.metadata])

    def place(self, node: cst.CSTNode) -> str:
        """Returns the path and line of a node, as in ``models.py:3``."""
        return f"{self.path}:{self.lines[self.line(node) - 1]}"


def read_file(name: str) -> ParsedFile:
    """Reads a file.

    Raises:
      PortError: there is no such file, or it is not Python.
    """
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        what = "is not a .py file" if path.exists() else "does not exist"
        raise PortError(f"{name!r} {what}: name the Python files to port, as in models.py train.py")
    try:
        return ParsedFile(path, path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise PortError(f"{name}: not UTF-8: {error}") from None


def matched_lines(before: Sequence[str], after: Sequence[str]) -> difflib.SequenceMatcher[str]:
    return difflib.SequenceMatcher(None, before, after, autojunk=False)


class Written:
    """The lines of a text, from 1, that are not those of the text before it.

    Attributes:
      lines: that are new or changed.
      cuts: after which lines were deleted.
    """

    def __init__(self, before: str, after: str):
        opcodes = matched_lines(before.splitlines(), after.splitlines()).get_opcodes()
        changed = [places for tag, *places in opcodes if tag != "equal"]
        self.lines = {line + 1 for _, _, j, end in changed for line in range(j, end)}
        self.cuts = {end for i, i_end, j, end in changed if i_end - i > end - j}

    def within(self, first: int, last: int) -> bool:
        """Returns whether a range of lines has a new one, or lost one between two of its lines."""
        is_new = any(first <= line <= last for line in self.lines)
        return is_new or any(first <= line < last for line in self.cuts)


def has_plain_lines(text: str) -> bool:
    """Returns whether all line breaks are those that Python's tokens have."""
    return text.splitlines() == text.replace("\r\n", "\n").removesuffix("\n").split("\n")


class Elsewhere:
    """The uses of names in the other files of the given files' packages.

    Files are those beside the given ones and, in a package, below its top folder, if they import
    a module of a given file's name.
    """

    def __init__(self, given: Sequence[Path]):
        own = {path.resolve() for path in given}
        self._given = {path.parent.name if path.stem == "__init__" else path.stem for path in own}
        roots = {_root(path) for path in own}
        found = {file for folder, pattern in roots for file in folder.glob(pattern)}
        self._calls: dict[str, list[tuple[str, ast.Call]]] = {}
        self._bases: dict[str, str] = {}
        self._attributes: list[tuple[str, str, str]] = []
        self._imports: set[str] = set()
        for file in sorted(found - own):
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))))
        except (SyntaxError, ValueError):
            return
        if not self._given & {name for node in nodes for name in _imported(node)}:
            return
        for node in nodes:
            place = f"{file.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                is_partial = _last(node.func).endswith("partial") and node.args
                called = _last(node.args[0] if is_partial else node.func)
                self._calls.setdefault(called, []).append((place, node))
            elif isinstance(node, ast.ImportFrom):
                self._imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                self._bases |= {_last(base): place for base in node.bases}
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
                self._attributes.append((_last(node.value), node.attr, place))

    def use_of(self, owner: str, name: str, position: int | None) -> str | None:
        """Returns the place of a call that passes an argument, or of a subclass, or None."""
        for place, call in self._calls.get(owner, ()):
            named = any(keyword.arg == name for keyword in call.keywords)
            if named or (position is not None and len(call.args) > position):
                return place
        return self._bases.get(owner)

    def splatting(self, owner: str) -> str | None:
        """Returns the place of a call with ``**``, or None."""
        calls = self._calls.get(owner, ())
        return next((p for p, call in calls if any(k.arg is None for k in call.keywords)), None)

    def imports(self, name: str) -> bool:
        """Returns whether another file imports or calls a name."""
        return name in self._imports or name in self._calls

    def reading(self, name: str, is_module: bool) -> str | None:
        """Returns the place of a read of an attribute, or None.

        Args:
          is_module: of a model; else of a configuration. Arrays have a `dtype`, too.
        """
        for base, attribute, place in self._attributes:
            is_clear = is_module or name != "dtype" or dtypes.CONFIGS.search(base)
            is_same = attribute == name and dtypes.is_model(base) == is_module
            if is_same and base != "self" and is_clear:
                return place
        return None


def _imported(node: ast.AST) -> list[str]:
    """Returns the parts of the names of modules that a statement imports."""
    names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
    module = getattr(node, "module", None)
    return [part for name in (*names, module or "") for part in name.split(".")]


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _root(file: Path) -> tuple[Path, str]:
    """Returns a file's folder, or the top one of its package, and the pattern of files there."""
    inside = itertools.takewhile(lambda one: (one / "__init__.py").exists(), file.parents)
    tops = list(inside)
    return (tops[-1], "**/*.py") if tops else (file.parent, "*.py")

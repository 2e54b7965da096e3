"""Files to port, parsed with LibCST, and the other files of their packages."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import metadata

from policy.porting import dtypes


class PortError(ValueError):
    """A file that can't be ported; the message says why."""


class ParsedFile:
    """A parsed file: its tree, and the scopes, imports, parents and lines of its nodes.

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
        self.module = wrapper.module
        self._scopes: Any = wrapper.resolve(metadata.ScopeProvider)
        self._names: Any = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents: Any = wrapper.resolve(metadata.ParentNodeProvider)
        self._positions: Any = wrapper.resolve(metadata.PositionProvider)

    def line(self, node: cst.CSTNode) -> int:
        return self.lines[self._positions[node].start.line - 1]

    def order(self, node: cst.CSTNode) -> int:
        """Returns the line in the current text."""
        return self._positions[node].start.line

    def code(self, node: cst.CSTNode) -> str:
        """Returns a node's text on one line."""
        return " ".join(self.module.code_for_node(node).split()).removesuffix(",")

    def parent(self, node: cst.CSTNode) -> Any:
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while (node := self._parents.get(node)) is not None:
            yield node

    def enclosing(self, node: cst.CSTNode, *types: type) -> Any:
        """Returns the innermost ancestor of one of the types, or None."""
        return next((a for a in self.ancestors(node) if isinstance(a, types)), None)

    def class_of(self, node: cst.CSTNode) -> str | None:
        """Returns the name of the class whose method or field a node is in."""
        found = self.enclosing(node, cst.ClassDef)
        return found.name.value if found else None

    def scopes(self) -> set[Any]:
        return {scope for scope in self._scopes.values() if scope is not None}

    def assignments(self, name: cst.Name) -> list[Any]:
        """Returns the bindings of a name, by LibCST's scopes; built-in names are left out."""
        scope = self._scopes.get(name)
        found = scope[name.value] if scope is not None else ()
        return [a for a in found if hasattr(a, "node")]

    def reads(self, target: cst.Name) -> list[cst.CSTNode]:
        """Returns the uses of a name from an assignment to the next one, by their lines."""
        line, bound = self.order(target), self.assignments(target)
        later = [n for a in bound if (n := self.order(a.node)) > line]
        end = min(later, default=len(self.lines))
        uses = {access.node for a in bound for access in a.references}
        return [use for use in uses if line < self.order(use) <= end]

    def imported(self, node: cst.CSTNode) -> str:
        """Returns the dotted name of an import, as in ``jax.numpy.zeros``, or ``""``."""
        inner = node
        while isinstance(inner, cst.Attribute):
            inner = inner.value
        for name in self._resolved(node) if isinstance(inner, cst.Name) else ():
            if name.source is metadata.QualifiedNameSource.IMPORT:
                return name.name
        return ""

    def _resolved(self, node: cst.CSTNode) -> Any:
        found = self._names.get(node, ())
        return found() if callable(found) else found


def nodes_of(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields a node and all nodes below it."""
    yield node
    for child in node.children:
        yield from nodes_of(child)


def text_of(statement: cst.CSTNode) -> cst.SimpleString | None:
    """Returns the text of a statement that is nothing else, as a docstring, or None."""
    inner = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    value = inner.value if isinstance(inner, cst.Expr) else None
    return value if isinstance(value, cst.SimpleString) else None


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


class Elsewhere:
    """The uses of names in the other files of the given files' packages.

    Files are those beside the given ones and, in a package, below its top folder, if they import
    a module of a given file's name.
    """

    def __init__(self, given: Sequence[Path]):
        own = {path.resolve() for path in given}
        self._given = {path.parent.name if path.stem == "__init__" else path.stem for path in own}
        found = {file for path in own for file in _neighbours(path)}
        self._calls: dict[str, list[tuple[str, ast.Call]]] = {}
        self._bases: dict[str, str] = {}
        self._attributes: list[tuple[str, str, str]] = []
        self._imports: set[str] = set()
        for file in sorted(found - own):
            self._read(file)

    def _read(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
        nodes = list(ast.walk(tree))
        if not self._given & {name for node in nodes for name in _imported(node)}:
            return
        for node in nodes:
            place = f"{file.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call):
                callee = node.func
                is_partial = ast.unparse(callee).endswith("partial") and node.args
                called = node.args[0] if is_partial else callee
                self._calls.setdefault(_last(called), []).append((place, node))
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
            is_model = base.lower().endswith(("model", "module"))
            is_clear = is_module or name != "dtype" or dtypes.CONFIGS.search(base)
            if attribute == name and base != "self" and is_model == is_module and is_clear:
                return place
        return None


def _imported(node: ast.AST) -> list[str]:
    """Returns the parts of the names of modules that a statement imports."""
    names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
    module = getattr(node, "module", None)
    return [part for name in (*names, module or "") for part in name.split(".")]


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


@functools.cache
def _neighbours(file: Path) -> frozenset[Path]:
    top = file.parent
    if not (top / "__init__.py").exists():
        return frozenset(top.glob("*.py"))
    while (top.parent / "__init__.py").exists():
        top = top.parent
    return frozenset(top.rglob("*.py"))

"""Names that nothing reads after a port, and docstrings of arguments that are gone."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import all_parameters, last_name, own_attributes
from policy.porting.edits import Edits, is_pure
from policy.porting.slots import pairs
from policy.porting.sources import Elsewhere, ParsedFile, nodes_of, text_of

Key = tuple[str, str]  # the path of a scope, and a name in it


def unused(source: ParsedFile) -> set[Key]:
    """Returns the names that a file binds and never reads, with those of attributes of `self`."""
    names = {
        (_path(source, scope), assignment.name)
        for scope in source.scopes()
        for assignment in scope.assignments
        if hasattr(assignment, "node") and not assignment.references
    }
    return names | {("self", name) for name, _ in _unread(source)}


def _unread(source: ParsedFile) -> list[tuple[str, cst.SimpleStatementLine]]:
    """Returns the attributes of `self` that a file sets and never reads, with their lines."""
    nodes = list(nodes_of(source.module))
    stored = [
        pair for node in nodes if isinstance(node, cst.ClassDef) for pair in own_attributes(node)
    ]
    texts = {node.raw_value for node in nodes if isinstance(node, cst.SimpleString)}
    names = [node.attr.value for node in nodes if isinstance(node, cst.Attribute)]
    return [(name, line) for name, line in stored if name not in texts and names.count(name) == 1]


def _path(source: ParsedFile, scope: object) -> str:
    node = getattr(scope, "node", None)
    if node is None:
        return ""
    chain = [node, *source.ancestors(node)]
    return ".".join(
        one.name.value for one in chain if isinstance(one, (cst.FunctionDef, cst.ClassDef))
    )


class Unused(dict[ParsedFile, Edits]):
    """Edits that delete the names that a port leaves unread; empty if there are none.

    Args:
      before: the names of each file that were unread before the port.
    """

    def __init__(
        self, sources: Sequence[ParsedFile], before: Sequence[set[Key]], elsewhere: Elsewhere
    ):
        super().__init__((source, Edits(source)) for source in sources)
        self._elsewhere = elsewhere
        for source, known in zip(sources, before, strict=True):
            self._read(source, known)
        for edits in self.values():
            edits.settle()

    def __bool__(self) -> bool:
        return any(self.values())

    def _read(self, source: ParsedFile, known: set[Key]) -> None:
        exported = {n.raw_value for n in nodes_of(source.module) if isinstance(n, cst.SimpleString)}
        for scope in source.scopes():
            path = _path(source, scope)
            for assignment in list(scope.assignments):
                name = assignment.name
                node = getattr(assignment, "node", None)
                if (
                    node is None
                    or (path, name) in known
                    or name in exported
                    or name.startswith("mpmodules")
                ):
                    continue
                if any(one.references for one in scope[name] if hasattr(one, "references")):
                    continue
                self._delete(source, scope, node, name)
        for name, line in _unread(source):
            value = getattr(line.body[0], "value", None)
            if ("self", name) not in known and isinstance(value, cst.Name):
                self[source].remove(line)

    def _delete(self, source: ParsedFile, scope: object, node: cst.CSTNode, name: str) -> None:
        in_function = isinstance(getattr(scope, "node", None), cst.FunctionDef)
        edits = self[source]
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            if not isinstance(node.names, cst.ImportStar):
                self._delete_import(source, node, name)
        elif isinstance(node, cst.FunctionDef):
            is_own = in_function or "dtype" in name or name[0] == "_"
            in_class = isinstance(source.parent(source.parent(node)), cst.ClassDef)
            if is_own and not in_class and not self._elsewhere.imports(name):
                edits.remove(node)
        elif isinstance(node, cst.Name):
            is_alias = "dtype" in name.lower() and not self._elsewhere.imports(name)
            statement = source.enclosing(node, cst.Assign, cst.AnnAssign)
            in_class = isinstance(getattr(scope, "node", None), cst.ClassDef)
            if statement is not None and not in_class and (in_function or is_alias):
                self._delete_assigned(source, statement, node)

    def _delete_import(
        self, source: ParsedFile, node: cst.Import | cst.ImportFrom, name: str
    ) -> None:
        edits = self[source]
        assert not isinstance(node.names, cst.ImportStar)
        for alias in node.names:
            if (alias.evaluated_alias or alias.evaluated_name.split(".")[0]) == name:
                edits.remove(alias)
        if all(edits.change_of(alias) is None for alias in node.names):
            edits.remove(source.parent(node))

    def _delete_assigned(
        self, source: ParsedFile, statement: cst.Assign | cst.AnnAssign, node: cst.Name
    ) -> None:
        for target, value, places in pairs(statement):
            if target is node and value is not None and is_pure(value):
                for place in places or (source.parent(statement),):
                    self[source].remove(place)


# --------------------------------------------------------------------------------------------------
# Docstrings
# --------------------------------------------------------------------------------------------------


def docstrings(source: ParsedFile, edits: Edits) -> Edits:
    """Adds the edits of docstrings to those of their arguments, fields and attributes."""
    for node in nodes_of(source.module):
        if not isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            continue
        names = {
            name
            for name, one in _described(node)
            if (edits.change_of(one) is None and dtypes.DTYPE_NAME.search(name))
            or dtypes.SCALE_NAME.search(name)
        }
        body = node.body.body
        text = text_of(body[0]) if body else None
        if text is not None and names:
            edits.add(text, lambda updated, names=names: _without(updated, names))
    return edits


def _described(node: cst.FunctionDef | cst.ClassDef) -> list[tuple[str, cst.CSTNode]]:
    if isinstance(node, cst.FunctionDef):
        return [(param.name.value, param) for param in all_parameters(node)]
    found: list[tuple[str, cst.CSTNode]] = []
    for line in node.body.body:
        if isinstance(line, cst.FunctionDef) and line.name.value == "__init__":
            found += _described(line)
        elif isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.AnnAssign):
            found.append((last_name(line.body[0].target), line))
    return found


_HEADER = re.compile(r"\s*(Args|Arguments|Attributes|Parameters|Fields):\s*")


def _without(text: cst.SimpleString, names: set[str]) -> cst.SimpleString:
    """Deletes the entries of names, and the headers of sections that become empty."""
    entry = re.compile(
        rf"(\s*)(?::param )?[`*]*(?:{'|'.join(map(re.escape, names))})[`*]*( ?\([^)]*\)| )?:"
    )
    lines: list[str] = []
    indent: int | None = None
    for line in text.value.split("\n"):
        own = len(line) - len(line.lstrip())
        if indent is not None and line.strip(" \"'") and own > indent:
            continue
        indent = None
        if found := entry.match(line):
            indent = len(found[1])
            if line.rstrip().endswith(text.quote):
                lines.append(found[1] + text.quote)
            continue
        lines.append(line)
    kept: list[str] = []
    for i, line in enumerate(lines):
        after = lines[i + 1] if i + 1 < len(lines) else ""
        if _HEADER.fullmatch(line) and not after.strip(" \"'"):
            while kept and not kept[-1].strip():
                kept.pop()
            continue
        kept.append(line)
    return text.with_changes(value="\n".join(kept))

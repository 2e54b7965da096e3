"""Names that nothing reads after a port, and docstrings of arguments that are gone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst

from policy.porting import dtypes
from policy.porting.edits import Edits, is_pure
from policy.porting.sources import Elsewhere, ParsedFile
from policy.porting.syntax import declared, nodes_of, own_attributes, pairs, text_of

_NAMED = (cst.FunctionDef, cst.ClassDef)
Key = tuple[str, str]  # the path of a scope, and a name in it
Unread = dict[Key, list[tuple[Any, cst.CSTNode]]]  # nodes that bind it, with those of their scopes


def unread(source: ParsedFile) -> Unread:
    """Returns the names that a file binds and never reads, with those of attributes of `self`."""
    found: Unread = {}
    for scope in source.scopes():
        for one in scope.assignments:
            known = [other.references for other in scope[one.name] if hasattr(other, "references")]
            if hasattr(one, "node") and not any(known):
                owner = getattr(scope, "node", None)
                found.setdefault((_path(source, owner), one.name), []).append((owner, one.node))
    nodes = list(nodes_of(source.module))
    names = [node.attr.value for node in nodes if isinstance(node, cst.Attribute)]
    for owner in (node for node in nodes if isinstance(node, cst.ClassDef)):
        for name, statement in own_attributes(owner):
            if names.count(name) == 1:
                found["self", name] = [(owner, statement)]
    texts = {node.raw_value for node in nodes if isinstance(node, cst.SimpleString)}
    return {key: places for key, places in found.items() if key[1] not in texts}


def _path(source: ParsedFile, owner: cst.CSTNode | None) -> str:
    chain = [] if owner is None else [owner, *source.ancestors(owner)]
    return ".".join(one.name.value for one in chain if isinstance(one, _NAMED))


def unread_notes(
    source: ParsedFile, names: Mapping[Key, Sequence[Any]], elsewhere: Elsewhere
) -> Iterator[str]:
    """Yields notes on functions that choose a dtype and were unread before the port: they stay."""
    for (path, name), places in names.items():
        if path == "" and re.search(dtypes.DTYPE_NAME, name) and not elsewhere.imports(name):
            for _, node in places:
                if isinstance(node, cst.FunctionDef):
                    yield f"{source.place(node)}: nothing here reads `{name}`: it may go"


def unread_edits(
    sources: Sequence[ParsedFile], before: Sequence[Mapping[Key, object]], elsewhere: Elsewhere
) -> Edits:
    """Returns the edits that delete the names that a port leaves unread.

    Args:
      before: the names of each file that were unread before the port.
    """
    return Edits(
        (gone, None)
        for source, known in zip(sources, before, strict=True)
        for key, places in unread(source).items()
        if key not in known and not key[1].startswith("mpmodules")
        for owner, node in places
        for gone in _deleted(source, elsewhere, owner, node, key[1])
    )


def _deleted(
    source: ParsedFile, elsewhere: Elsewhere, owner: Any, node: cst.CSTNode, name: str
) -> Iterator[cst.CSTNode]:
    """Yields what goes with a name that a node binds in a scope."""
    in_function, in_class = (isinstance(owner, one) for one in _NAMED)
    is_imported = elsewhere.imports(name)
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
            if (alias.evaluated_alias or alias.evaluated_name.split(".")[0]) == name:
                yield alias
    elif isinstance(node, cst.FunctionDef):
        is_own = in_function or "dtype" in name or name[0] == "_"
        if is_own and not in_class and not is_imported:
            yield node
    elif isinstance(node, (cst.Assign, cst.AnnAssign)):  # of an attribute
        if isinstance(node.value, cst.Name):
            yield source.parent(node)
    elif in_function or (not (in_class or is_imported) and "dtype" in name.lower()):
        statement = source.enclosing(node, cst.Assign, cst.AnnAssign)
        for target, value, places in pairs(statement):
            if target is node and is_pure(value):
                yield from places or (source.parent(statement),)


# --------------------------------------------------------------------------------------------------
# Docstrings
# --------------------------------------------------------------------------------------------------


def docstring_edits(nodes: Iterable[cst.CSTNode], edits: Edits) -> Edits:
    """Adds the edits of docstrings to those of their arguments, fields and attributes."""
    for node in nodes:
        if isinstance(node, _NAMED) and node.body.body:
            own, text = declared(node), text_of(node.body.body[0])
            names = {n for n, one in own if edits.removes(one) and re.search(dtypes.DTYPE_NAME, n)}
            names |= {name for name, _ in own if re.search(dtypes.SCALE_NAME, name)}
            if text is not None and names:
                edits[text] = lambda updated, names=names: _without(updated, names)
    return edits


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
        found = entry.match(line)
        indent = len(found[1]) if found else None
        if found is None:
            lines.append(line)
        elif line.rstrip().endswith(text.quote):
            lines.append(found[1] + text.quote)
    kept: list[str] = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if _HEADER.fullmatch(line) and not after.strip(" \"'"):
            while kept and not kept[-1].strip():
                kept.pop()
        else:
            kept.append(line)
    return text.with_changes(value="\n".join(kept))

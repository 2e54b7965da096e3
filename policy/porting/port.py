"""Ports Flax code: imports from mpmodules, and layers without the dtypes that a policy decides."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections import defaultdict
from pathlib import Path

from policy.porting.imports import imports_flax, moved_aliases, moved_statement, swapped_text
from policy.porting.layers import LinesByReason, arguments_that_go
from policy.porting.listing import lines_to_delete
from policy.porting.names import Names
from policy.porting.source import PortError, PythonFile, parsed, read_source, removed

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclasses.dataclass(frozen=True)
class Ported:
    """A file before and after its port.

    Attributes:
      name: its path, as it was given.
      before, after: the text.
      encoding: of the file.
      arguments: the number of dtype arguments that were deleted.
      stays: lines of dtypes that stay, by the reason.
      deletable: lines that a person may delete, by the reason.
      has_flax: whether it imports `flax.linen` or `flax.nnx`.
    """

    name: str
    before: str
    after: str
    encoding: str
    arguments: int
    stays: LinesByReason
    deletable: LinesByReason
    has_flax: bool = True

    def diff(self) -> str:
        """Returns a unified diff."""
        name = self.name.lstrip("/")
        before, after = (_LINE.findall(text) for text in (self.before, self.after))
        return "".join(
            line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        )

    def lines(self) -> int:
        """Returns the number of lines of the file."""
        return len(_LINE.findall(self.before))


def port_file(name: str) -> Ported:
    """Returns a file with its port, which nothing writes.

    Raises:
      PortError: the file can't be read, is not Python, or can't be ported.
    """
    try:
        return ported(read_source(Path(name)), name)
    except RecursionError:
        raise PortError("nested too deeply") from None


def ported(source: PythonFile, name: str) -> Ported:
    """Returns a source with its port.

    Raises:
      PortError: an edit would change more than imports and dtype arguments of layers.
    """
    text = source.data.decode()
    if not imports_flax(source):
        return Ported(name, text, text, source.encoding, 0, {}, {}, has_flax=False)
    moved = moved_aliases(source)
    names = Names(source, moved)
    stays: LinesByReason = defaultdict(set)
    going = arguments_that_go(source, names, stays)
    deletable = lines_to_delete(source, names, going, set().union(*stays.values()))
    keywords = [k for call, gone in going.items() for k in call.keywords if k.arg in gone]
    statements = list(dict.fromkeys(source.parents[alias] for alias in moved))
    data = source.data
    for node in sorted([*keywords, *statements], key=source.span, reverse=True):
        if isinstance(node, ast.Import | ast.ImportFrom):
            data = swapped_text(source, data, node)
        else:
            data = removed(data, *source.span(node))
    _require_equal(source, statements, going, data)
    return Ported(name, text, data.decode(), source.encoding, len(keywords), dict(stays), deletable)


def _require_equal(
    source: PythonFile, statements: list[ast.AST], going: dict[ast.Call, list[str]], data: bytes
) -> None:
    """Compares the tree of a ported text with the tree in which the nodes are edited.

    Raises:
      PortError: they differ: the text was edited elsewhere.
    """
    for call, gone in going.items():
        call.keywords = [each for each in call.keywords if each.arg not in gone]
    aliases = moved_aliases(source)
    for statement in statements:
        _swap(source, statement, aliases)
    try:
        is_equal = ast.dump(source.tree) == ast.dump(parsed(data))
    except PortError:
        is_equal = False
    if not is_equal:
        raise PortError("its port would change more than imports and arguments")


def _swap(source: PythonFile, node: ast.AST, moved: dict[ast.alias, str]) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            alias.name = moved.get(alias, alias.name)
    elif isinstance(node, ast.ImportFrom):
        made = moved_statement(node)
        node.names = [alias for alias in node.names if alias not in moved]
        parent = source.parents[node]
        for _, body in ast.iter_fields(parent):
            if isinstance(body, list) and node in body:
                i = body.index(node)
                body[i : i + 1] = [made, node] if node.names else [made]

"""Import lines: Flax's layers become those of mpmodules."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from policy.porting.sources import ParsedFile, nodes_of

_WINGS = ("linen", "nnx")
_WHOLE = ("flax.linen", "flax.nnx")
# modules of flax.linen that mpmodules.linen doesn't hold
_FLAX_ONLY = ("partitioning", "experimental", "kw_only_dataclasses")
# layers, in modules below flax.linen and flax.nnx
_LAYERS = re.compile(
    r"Linear\w*|Dense|DenseGeneral|Einsum|Embed|Conv|ConvTranspose|ConvLocal|[A-Z]\w+Norm|"
    r"[A-Z]\w+Attention|[A-Z]\w+Cell|RNN|Bidirectional"
)


def ported_imports(source: ParsedFile, notes: list[str]) -> str:
    """Returns a file's text with its imports from mpmodules.

    Args:
      notes: gets a line for each import that is left alone.
    """
    editing = _Imports(source, notes)
    return source.module.visit(editing).code


class _Imports(cst.CSTTransformer):
    def __init__(self, source: ParsedFile, notes: list[str]):
        super().__init__()
        self._source, self._notes = source, notes
        for node in nodes_of(source.module):
            is_whole = isinstance(node, cst.Attribute) and source.code(node) in _WHOLE
            if is_whole and source.enclosing(node, cst.Import, cst.ImportFrom) is None:
                self._note(node, f"`{source.code(node)}` is Flax's: import mpmodules by a name")

    def _note(self, node: cst.CSTNode, text: str) -> None:
        self._notes.append(f"{self._source.path}:{self._source.line(node)}: {text}")

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        del original_node
        if len(updated_node.body) != 1:
            return updated_node
        statement = updated_node.body[0]
        if isinstance(statement, cst.Import):
            return self._import(updated_node, statement)
        if isinstance(statement, cst.ImportFrom) and not isinstance(
            statement.names, cst.ImportStar
        ):
            return self._import_from(updated_node, statement)
        return updated_node

    def _import(self, line: cst.SimpleStatementLine, statement: cst.Import) -> Any:
        names = []
        for alias in statement.names:
            name = alias.evaluated_name
            if alias.asname and name in _WHOLE:
                wing = name.partition(".")[2]
                alias = alias.with_changes(name=_dotted(f"mpmodules.{wing}"))
            names.append(alias)
        return line.with_changes(body=[statement.with_changes(names=names)])

    def _import_from(self, line: cst.SimpleStatementLine, statement: cst.ImportFrom) -> Any:
        module = "" if statement.module is None else self._source.code(statement.module)
        assert not isinstance(statement.names, cst.ImportStar)
        if statement.relative or not module.startswith("flax"):
            return line
        if module == "flax":
            moves = [alias.evaluated_name in _WINGS for alias in statement.names]
            target = "mpmodules"
        elif module in _WHOLE:
            moves = [alias.evaluated_name not in _FLAX_ONLY for alias in statement.names]
            target = f"mpmodules.{module.partition('.')[2]}"
        elif (wing := module.split(".")[1]) in _WINGS:
            moves = [bool(_LAYERS.fullmatch(alias.evaluated_name)) for alias in statement.names]
            target = f"mpmodules.{wing}"
        else:
            return line
        moved = [alias for alias, moves_ in zip(statement.names, moves, strict=True) if moves_]
        left = [alias for alias, moves_ in zip(statement.names, moves, strict=True) if not moves_]
        if not moved:
            return line
        if not left:
            return line.with_changes(body=[statement.with_changes(module=_dotted(target))])
        first = line.with_changes(body=[_of_names(statement, left)])
        second = cst.SimpleStatementLine([_of_names(statement, moved, target)])
        return cst.FlattenSentinel([first, second])


def _of_names(statement: cst.ImportFrom, names: list[cst.ImportAlias], module: str = "") -> Any:
    last = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    made = statement.with_changes(names=[*names[:-1], last])
    if module:
        made = made.with_changes(module=_dotted(module))
    return made


def _dotted(name: str) -> Any:
    return cst.parse_expression(name)

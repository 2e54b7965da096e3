"""Import lines: Flax's layers become those of mpmodules."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from policy.porting.sources import ParsedFile
from policy.porting.syntax import nodes_of

_WHOLE = ("flax.linen", "flax.nnx")
_WINGS = re.compile("linen|nnx")
# modules of flax.linen that mpmodules.linen doesn't hold
_HELD = re.compile("(?!(partitioning|experimental|kw_only_dataclasses)$).*")
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
    for node in nodes_of(source.module):
        name = get_full_name_for_node(node) if isinstance(node, cst.Attribute) else ""
        if name in _WHOLE and source.enclosing(node, cst.Import, cst.ImportFrom) is None:
            notes.append(f"{source.place(node)}: `{name}` is Flax's: import mpmodules by a name")
    return source.module.visit(_Imports()).code


class _Imports(cst.CSTTransformer):
    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        names = list(updated_node.names)
        for i, alias in enumerate(original_node.names):
            if alias.asname and alias.evaluated_name in _WHOLE:
                names[i] = alias.with_changes(name=_dotted(alias.evaluated_name[len("flax.") :]))
        return updated_node.with_changes(names=names)

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        statement = original_node.body[0]
        is_alone = len(original_node.body) == 1 and isinstance(statement, cst.ImportFrom)
        if not is_alone or statement.relative or isinstance(statement.names, cst.ImportStar):
            return updated_node
        name = get_full_name_for_node(statement.module or "") or ""
        package, wing, below = [*name.split("."), "", ""][:3]
        if package != "flax" or not (_WINGS.fullmatch(wing) or name == "flax"):
            return updated_node
        moving = _LAYERS if below else _HELD if wing else _WINGS
        moved = [one for one in statement.names if moving.fullmatch(one.evaluated_name)]
        left = [one for one in statement.names if one not in moved]
        made = statement.with_changes(module=_dotted(wing))
        if not moved or not left:
            return updated_node.with_changes(body=[made]) if moved else updated_node
        first, second = _with_names(statement, left), _with_names(made, moved)
        line = updated_node.with_changes(body=[first])
        return cst.FlattenSentinel([line, cst.SimpleStatementLine([second])])


def _with_names(statement: cst.ImportFrom, names: list[cst.ImportAlias]) -> cst.ImportFrom:
    last = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return statement.with_changes(names=[*names[:-1], last])


def _dotted(wing: str) -> Any:
    return cst.parse_expression(f"mpmodules.{wing}".removesuffix("."))

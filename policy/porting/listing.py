"""Lines that a person may delete after a port, by their reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from policy.porting.dtypes import ARGUMENTS, constant, is_dtype_name, last_name
from policy.porting.layers import LinesByReason
from policy.porting.names import Names
from policy.porting.source import PythonFile

_HOLDS = "holds a dtype that may go where no layer reads it and no caller passes it"
_CAST = "a cast to the model's dtype, which a policy decides"
_PASSES = "passes a dtype along: a layer that gets it obeys it"
_CHOSEN = "16 bits were chosen here: set a policy"
_UNREAD = "an import that nothing reads"
_SCALE = "a loss scale by hand: policy.mixed_precision(tx, policy, loss_scale='dynamic')"
_ELSEWHERE = "Flax's, not imported by its own name: `from mpmodules import linen as nn`"
_CASTS = ("astype", "asarray", "array", "convert_element_type")


def lines_to_delete(
    source: PythonFile, names: Names, edited: dict[ast.Call, list[str]], kept: set[int]
) -> LinesByReason:
    """Returns the lines that a policy makes needless, by their reason.

    Args:
      edited: the calls whose arguments the port deletes.
      kept: lines of arguments that stay, each with its reason.
    """
    notes: LinesByReason = {}
    gone = {k for call, kept in edited.items() for k in call.keywords if k.arg in kept}
    inside = {node for keyword in gone for node in ast.walk(keyword)}
    for node in source.nodes:
        if node not in inside:
            for reason in _reasons(source, names, node):
                notes.setdefault(reason, set()).add(_line(node))
    notes[_PASSES] = notes.get(_PASSES, set()) - kept
    for name, line in _unread(source, inside):
        notes.setdefault(f"{_UNREAD}: {name}", set()).add(line)
    return {reason: lines for reason, lines in notes.items() if lines}


def _reasons(source: PythonFile, names: Names, node: ast.AST) -> Iterator[str]:
    parent = source.parents.get(node)
    if isinstance(node, ast.AnnAssign) and isinstance(parent, ast.ClassDef):
        yield from [_HOLDS] * is_dtype_name(last_name(node.target))
    elif isinstance(node, ast.arg):
        yield from [_HOLDS] * is_dtype_name(node.arg)
    elif isinstance(node, ast.Call) and last_name(node.func) in _CASTS:
        values = [*node.args[-1:], *(k.value for k in node.keywords if k.arg in ARGUMENTS)]
        is_cast = any(is_dtype_name(last_name(v)) for v in values if not isinstance(v, ast.Name))
        yield from [_CAST] * is_cast
    elif isinstance(node, ast.keyword) and is_dtype_name(node.arg or ""):
        is_model = (
            isinstance(node.value, ast.Name | ast.Attribute) and constant(names, node.value) is None
        )
        yield from [_PASSES] * (is_model and last_name(getattr(parent, "func", None)) not in _CASTS)
    elif isinstance(node, ast.Attribute | ast.Name | ast.Constant):
        is_half = not isinstance(parent, ast.Expr) and constant(names, node) in (
            "bfloat16",
            "float16",
        )
        yield from [_CHOSEN] * is_half
    if isinstance(node, ast.Attribute) and source.code(node) in ("flax.linen", "flax.nnx"):
        yield _ELSEWHERE
    if isinstance(node, ast.alias) and node.name.endswith(("dynamic_scale", "DynamicScale")):
        yield _SCALE


def _unread(source: PythonFile, inside: set[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yields the imported names that only deleted arguments read."""
    reads = [node for node in source.nodes if isinstance(node, ast.Name)]
    gone = {node.id for node in reads if node in inside}
    gone -= {node.id for node in reads if node not in inside}
    for node in source.nodes:
        if isinstance(node, ast.alias) and (name := node.asname or node.name) in gone:
            yield name, node.lineno


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 1)

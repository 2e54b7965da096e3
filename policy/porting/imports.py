"""Imports of `flax.linen` and `flax.nnx`, from mpmodules after a port."""

from __future__ import annotations

import ast
import re

from policy.porting.source import PortError, PythonFile, line_start, removed

_APIS = ("flax.linen", "flax.nnx")
# the classes with a dtype; a test compares them with Flax's
_LAYERS = """
    BatchNorm Conv ConvLSTMCell ConvLocal ConvTranspose Dense DenseGeneral Einsum Embed GRUCell
    GroupNorm InstanceNorm LSTMCell LayerNorm Linear LinearGeneral LoRA MGUCell MultiHeadAttention
    MultiHeadDotProductAttention OptimizedLSTMCell PReLU RMSNorm SelfAttention SimpleCell
    SpectralNorm WeightNorm
"""
LAYERS = frozenset(_LAYERS.split())
# modules of Flax's that have Flax's layers, or are not in mpmodules
_MODULES = {"attention", "linear", "nn", "normalization", "partitioning", "recurrent", "spmd"}


def moved_name(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str | None:
    """Returns the dotted name of an imported name in mpmodules, or None if it is not moved."""
    if isinstance(statement, ast.Import):
        is_api = alias.asname is not None and alias.name in _APIS
        return _ours(alias.name) if is_api else None
    whole = f"{statement.module}.{alias.name}"
    if statement.level or alias.name in _MODULES:
        return None
    if whole in _APIS or statement.module in _APIS:
        return _ours(whole)
    api = next((api for api in _APIS if whole.startswith(f"{api}.")), None)
    is_moved = api is not None and alias.name in LAYERS | {"Module"}
    return f"{_ours(api)}.{alias.name}" if api is not None and is_moved else None


def _ours(name: str) -> str:
    return name.replace("flax", "mpmodules", 1)


def imports_flax(source: PythonFile) -> bool:
    """Returns whether a file imports `flax.linen` or `flax.nnx`, or their parts in mpmodules."""
    for node in source.nodes:
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names] if not node.level else []
        for name in names:
            if f"{_ours(name)}.".startswith(("mpmodules.linen.", "mpmodules.nnx.")):
                return True
    return any(
        isinstance(node, ast.Attribute) and source.code(node) in _APIS for node in source.nodes
    )


def moved_aliases(source: PythonFile) -> dict[ast.alias, str]:
    """Returns the imported names that move, each with its dotted name in mpmodules."""
    found: dict[ast.alias, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias: moved_name(node, alias) for alias in node.names}
            found |= {alias: name for alias, name in names.items() if name is not None}
    return found


def swapped_text(source: PythonFile, data: bytes, node: ast.Import | ast.ImportFrom) -> bytes:
    """Returns a text with the moved names of a statement imported from mpmodules.

    Args:
      data: the text, which is that of the source up to the end of the statement.
    """
    moved = {alias: name for alias in node.names if (name := moved_name(node, alias))}
    if isinstance(node, ast.Import):
        for alias in reversed(list(moved)):
            start, _ = source.span(alias)
            data = data[:start] + moved[alias].encode() + data[start + len(alias.name) :]
        return data
    start, _ = source.span(node)
    if len(moved) == len(node.names):
        head = re.compile(rb"from\s+").match(data, start)
        old = (node.module or "").encode()
        if head is None or not data.startswith(old, head.end()):
            raise PortError("an import that is written over several lines", node.lineno)
        return data[: head.end()] + moved_module(moved) + data[head.end() + len(old) :]
    for alias in reversed(list(moved)):
        data = removed(data, *source.span(alias))
    before = data[line_start(data, start) : start]
    newline = re.search(rb"\r\n|\r|\n", data)
    separator = b"; " if before.strip() or newline is None else newline[0] + before
    line = ast.unparse(moved_statement(node)).encode()
    return data[:start] + line + separator + data[start:]


def moved_statement(node: ast.ImportFrom) -> ast.ImportFrom:
    """Returns the statement that imports the moved names of one, from mpmodules."""
    moved = {alias: name for alias in node.names if (name := moved_name(node, alias))}
    return ast.ImportFrom(moved_module(moved).decode(), list(moved), 0)


def moved_module(moved: dict[ast.alias, str]) -> bytes:
    """Returns the one module that the moved names of a statement come from."""
    (module,) = {name.rpartition(".")[0] for name in moved.values()}
    return module.encode()

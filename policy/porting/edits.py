"""Edits of a file's tree that keep its formatting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from policy.porting.syntax import elements, last_name, nodes_of

_QUIET = r"""(?x)
    local_devices | devices | default_backend | partial | dtype | getattr | DynamicScale |
    canonicalize_dtype | get | isinstance | len | next | iter
"""
_EFFECTS = (cst.Await, cst.Yield, cst.NamedExpr)


def is_pure(node: cst.CSTNode) -> bool:
    """Returns whether evaluating an expression has no effect."""
    nodes = list(nodes_of(node))
    called = [last_name(n.func) for n in nodes if isinstance(n, cst.Call)]
    is_quiet = all(re.fullmatch(_QUIET, name) or "dtype" in name for name in called)
    return is_quiet and not any(isinstance(n, _EFFECTS) for n in nodes)


Edit = tuple[cst.CSTNode, Any]  # a node and its change


class Edits(dict[cst.CSTNode, Any]):
    """Edits by their nodes: None removes; ``("inline", branch)`` puts a branch in an `if`'s place.

    Others are functions from the node, with the changes within, to another.
    """

    def is_gone(self, node: cst.CSTNode | None) -> bool:
        """Returns whether nothing remains of a statement."""
        if node is None or node in self:
            return node is None or self[node] in (None, ("inline", None))
        if isinstance(node, cst.If):
            return is_pure(node.test) and self.is_gone(node.body) and self.is_gone(node.orelse)
        if isinstance(node, cst.Else):
            return self.is_gone(node.body)
        if isinstance(node, (cst.IndentedBlock, cst.SimpleStatementLine)):
            return all(map(self.is_gone, node.body))
        parts = getattr(node, "targets", getattr(node, "names", ()))
        if isinstance(node, cst.Assign) and len(parts) == 1:
            parts = [one for one, _ in elements(parts[0].target, node.value)]
        return isinstance(parts, Sequence) and bool(parts) and all(part in self for part in parts)

    def text(self, module: cst.Module) -> str:
        return module.visit(_Editing(self)).code

    def removes(self, node: cst.CSTNode) -> bool:
        return node in self and self[node] is None


# the lists that removed nodes are taken out of
_MAY_BE_EMPTY = ("args", "posonly_params", "params", "kwonly_params")
_LISTS = (*_MAY_BE_EMPTY, "elements", "names", "targets")


class _Editing(cst.CSTTransformer):
    """Applies edits; the parents of removed nodes close the gaps."""

    def __init__(self, edits: Edits):
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        if changes := self._changes(original_node, updated_node):
            updated_node = updated_node.with_changes(**changes)
        change = self._edits.get(original_node)
        return change(updated_node) if callable(change) else updated_node

    def _changes(self, before: Any, after: Any) -> dict[str, Any]:
        """Returns the lists of a node that lose elements, and what else changes with them."""
        found: dict[str, Any] = {}
        is_dict = isinstance(before, cst.Dict)
        for name in _LISTS:
            items = getattr(before, name, None)
            if isinstance(items, Sequence) and any(map(self._edits.removes, items)):
                left = self._kept(items, getattr(after, name))
                if left or is_dict or name in _MAY_BE_EMPTY:
                    found[name] = left
        if found.get("args") == []:
            found["whitespace_before_args"] = _NOTHING
        if found.get("kwonly_params") == [] and isinstance(after.star_arg, cst.ParamStar):
            found["star_arg"] = cst.MaybeSentinel.DEFAULT
            if params := list(found.get("params", after.params)):
                params[-1] = _closed(params[-1], before.kwonly_params[-1], is_last=True)
            found["params"] = params
        is_function = isinstance(before, cst.FunctionDef) and bool(before.params.children)
        if is_function and not after.params.children:
            found["whitespace_before_params"] = _NOTHING
        if isinstance(before, cst.If) and self._edits.is_gone(before.orelse):
            found["orelse"] = None
        if isinstance(before, (cst.Module, cst.IndentedBlock)):
            found["body"] = self._statements(before.body, after.body)
            if not found["body"] and isinstance(before, cst.IndentedBlock):
                found["body"] = [cst.parse_statement("pass")]
        if isinstance(before, cst.Assign):
            both, left = (elements(one.targets[0].target, one.value) for one in (before, after))
            if len(left) == 1 < len(both):  # of `a, b = c, d`
                found["targets"] = [after.targets[0].with_changes(target=left[0][0].value)]
                found["value"] = left[0][1].value
        return found

    def _kept(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Returns the elements that stay; a removed one's line goes with its comment."""
        found: list[Any] = []
        for old, new in zip(before, after, strict=True):
            if not self._edits.removes(old):
                found.append(new)
            elif found and hasattr(new, "comma"):
                found[-1] = _closed(found[-1], new, is_last=old is before[-1])
        return found

    def _statements(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Leaves removed statements out; comments that don't speak of dtypes move on."""
        found: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        for old, new in zip(before, after, strict=True):
            change, lines = self._edits.get(old), getattr(new, "leading_lines", ())
            if isinstance(change, tuple) and change[1] is not None:
                first, *rest = (new if change[1] is old.body else new.orelse).body.body
                joined = [*lines, *first.leading_lines]
                found += [first.with_changes(leading_lines=joined), *rest]
            elif self._edits.is_gone(old):
                waiting += without_dtypes(lines)
            else:
                if waiting and hasattr(new, "leading_lines"):
                    new = new.with_changes(leading_lines=_joined(waiting, lines))
                waiting = []
                found.append(new)
        return found


_NOTHING = cst.SimpleWhitespace("")


def _closed(element: Any, removed: Any, is_last: bool) -> Any:
    """Returns an element without a removed one after it, with the line break that this had.

    Args:
      is_last: the removed one was the last, and now the element is.
    """
    both: list[Any] = [getattr(e.comma, "whitespace_after", None) for e in (element, removed)]
    own, after = both
    is_broken, is_broken_after = (isinstance(w, cst.ParenthesizedWhitespace) for w in both)
    if after is not None and (is_broken if is_last else is_broken_after):
        if is_broken and is_broken_after:
            after = after.with_changes(first_line=own.first_line)
        return element.with_changes(comma=element.comma.with_changes(whitespace_after=after))
    if not is_last:
        return element
    spaces = [n for n in ("whitespace_after_arg", "whitespace_after_param") if hasattr(removed, n)]
    changes = {name: getattr(removed, name) for name in spaces}
    return element.with_changes(comma=cst.MaybeSentinel.DEFAULT, **changes)


def without_dtypes(lines: Sequence[Any]) -> list[Any]:
    """Leaves out lines that are comments on dtypes, with those that go on with their sentences."""
    words = ("dtype", "precision", "float", "bf16", "f32", "dynamic scale", "loss scale")
    found, goes_on = [], False
    for line in lines:
        text = "" if line.comment is None else line.comment.value.lower()
        if not (goes_on and text) and not any(word in text for word in words):
            found.append(line)
            goes_on = False
        else:
            goes_on = not text.endswith((".", ":", "!", "?"))
    return found


def _joined(waiting: list[Any], lines: Sequence[Any]) -> list[Any]:
    """Joins leading lines: of several blank lines that meet, the longest group stays."""
    blanks = [line for line in waiting if line.comment is None]
    comments = [line for line in waiting if line.comment is not None]
    count = next((i for i, line in enumerate(lines) if line.comment is not None), len(lines))
    return [*(blanks[: max(0, len(blanks) - count)] if not comments else blanks), *comments, *lines]

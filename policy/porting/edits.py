"""Edits of a file's tree that keep its formatting."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from policy.porting.sources import ParsedFile, nodes_of

_QUIET = re.compile(
    r"""
    local_devices | devices | default_backend | partial | dtype | getattr | DynamicScale |
    canonicalize_dtype | get | isinstance | len | next | iter
    """,
    re.VERBOSE,
)


def is_pure(node: cst.CSTNode) -> bool:
    """Returns whether evaluating an expression has no effect."""
    return not any(
        isinstance(n, (cst.Await, cst.Yield, cst.NamedExpr))
        or (isinstance(n, cst.Call) and not _is_quiet(n.func))
        for n in nodes_of(node)
    )


def _is_quiet(function: cst.BaseExpression) -> bool:
    name = getattr(getattr(function, "attr", function), "value", "")
    return isinstance(name, str) and (bool(_QUIET.fullmatch(name)) or "dtype" in name)


def elements(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> list[tuple[cst.BaseElement, cst.BaseElement]] | None:
    """Returns the pairs of ``a, b = c, d``, or None for another assignment."""
    if not isinstance(target, cst.Tuple) or not isinstance(value, cst.Tuple):
        return None
    if len(target.elements) != len(value.elements):
        return None
    return list(zip(target.elements, value.elements, strict=True))


class Edits:
    """Edits of a file: nodes to remove or to change, applied together by `text`."""

    def __init__(self, source: ParsedFile):
        self.source = source
        self._changes: dict[cst.CSTNode, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._changes)

    def remove(self, node: cst.CSTNode) -> None:
        self._changes[node] = None

    def add(self, node: cst.CSTNode, change: Any) -> None:
        """Adds a change: None removes; ``("inline", branch)`` puts a branch in an `if`'s place.

        Others are functions from the node, with the changes within, to another.
        """
        self._changes[node] = change

    def settle(self) -> None:
        """Removes each `if` without statements, from the innermost on."""
        for node in reversed([n for n in nodes_of(self.source.module) if isinstance(n, cst.If)]):
            if node not in self._changes and self.is_gone(node):
                self.remove(node)

    def is_gone(self, node: cst.CSTNode | None) -> bool:
        """Returns whether nothing remains of a statement."""
        if node is None:
            return True
        if node in self._changes:
            change = self._changes[node]
            return change is None or change == ("inline", None)
        if isinstance(node, cst.If):
            return is_pure(node.test) and self.is_gone(node.body) and self.is_gone(node.orelse)
        if isinstance(node, cst.Else):
            return self.is_gone(node.body)
        if isinstance(node, cst.IndentedBlock):
            return all(self.is_gone(one) for one in node.body)
        if isinstance(node, cst.SimpleStatementLine):
            return all(self.is_gone(one) for one in node.body)
        if isinstance(node, cst.Assign) and len(node.targets) > 1:
            return all(target in self._changes for target in node.targets)
        if isinstance(node, cst.Assign):
            both = elements(node.targets[0].target, node.value)
            return bool(both) and all(one in self._changes for one, _ in both or ())
        return False

    def text(self) -> str:
        changed = self.source.module.visit(_Editing(self))
        assert isinstance(changed, cst.Module)
        return changed.code

    def change_of(self, node: cst.CSTNode) -> Any:
        return self._changes.get(node, _UNCHANGED)


_UNCHANGED = object()


class _Editing(cst.CSTTransformer):
    """Applies edits; the parents of removed nodes close the gaps."""

    def __init__(self, edits: Edits):
        super().__init__()
        self._edits = edits

    def _removed(self, node: cst.CSTNode) -> bool:
        return self._edits.change_of(node) is None

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        updated = super().on_leave(original_node, updated_node)
        change = self._edits.change_of(original_node)
        return change(updated) if callable(change) else updated

    def _kept(self, before: Sequence[Any], after: Sequence[Any]) -> tuple[list[Any], bool]:
        return kept(before, after, self._removed)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        args, changed = self._kept(original_node.args, updated_node.args)
        if not changed:
            return updated_node
        if not args:
            return updated_node.with_changes(args=[], whitespace_before_args=_NOTHING)
        return updated_node.with_changes(args=args)

    def leave_Parameters(self, original_node: cst.Parameters, updated_node: cst.Parameters) -> Any:
        found: dict[str, Any] = {}
        for name in ("posonly_params", "params", "kwonly_params"):
            part, changed = self._kept(getattr(original_node, name), getattr(updated_node, name))
            if changed:
                found[name] = part
        star = updated_node.star_arg
        if found.get("kwonly_params") == [] and isinstance(star, cst.ParamStar):
            found["star_arg"] = cst.MaybeSentinel.DEFAULT
            before = found.get("params", updated_node.params)
            if before:
                last = original_node.kwonly_params[-1]
                found["params"] = [*before[:-1], _closed(before[-1], last)]
        return updated_node.with_changes(**found)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: Any) -> Any:
        given = updated_node.params
        parts = (given.params, given.kwonly_params, given.posonly_params)
        if original_node.params.children and not any(parts) and not given.children:
            return updated_node.with_changes(whitespace_before_params=_NOTHING)
        return updated_node

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> Any:
        found, changed = self._kept(original_node.elements, updated_node.elements)
        return updated_node.with_changes(elements=found) if changed else updated_node

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Any:
        target, value = original_node.targets[0].target, original_node.value
        if len(original_node.targets) > 1 and not self._edits.is_gone(original_node):
            targets, _ = self._kept(original_node.targets, updated_node.targets)
            return updated_node.with_changes(targets=targets)
        if elements(target, value) is None or self._edits.is_gone(original_node):
            return updated_node
        sides = []
        for before, after in (
            (target, updated_node.targets[0].target),
            (value, updated_node.value),
        ):
            assert isinstance(before, cst.Tuple) and isinstance(after, cst.Tuple)
            left, changed = self._kept(before.elements, after.elements)
            if not changed:
                return updated_node
            single = left[0].value if len(left) == 1 else after.with_changes(elements=left)
            sides.append(single)
        first = updated_node.targets[0].with_changes(target=sides[0])
        return updated_node.with_changes(targets=[first], value=sides[1])

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        if original_node.orelse is not None and self._edits.is_gone(original_node.orelse):
            return updated_node.with_changes(orelse=None)
        return updated_node

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: Any) -> Any:
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node
        names, changed = self._kept(original_node.names, updated_node.names)
        return updated_node.with_changes(names=names) if changed and names else updated_node

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: Any) -> Any:
        body = self._statements(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body or [cst.parse_statement("pass")])

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> Any:
        body = self._statements(original_node.body, updated_node.body)
        return updated_node.with_changes(body=body)

    def _statements(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Leaves removed statements out; comments that don't speak of dtypes move on."""
        found: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        for old, new in zip(before, after, strict=True):
            change, lines = self._edits.change_of(old), getattr(new, "leading_lines", ())
            if isinstance(change, tuple) and change[1] is not None:
                branch = [n for n in nodes_of(new) if isinstance(n, cst.IndentedBlock)]
                inlined = list((branch[0] if change[1] is old.body else new.orelse.body).body)
                first: Any = inlined[0]
                joined = [*lines, *first.leading_lines]
                inlined[0] = first.with_changes(leading_lines=joined)
                found += inlined
            elif self._edits.is_gone(old):
                waiting += [line for line in lines if not _speaks_of_dtypes(line)]
            else:
                if waiting and hasattr(new, "leading_lines"):
                    new = new.with_changes(leading_lines=_joined(waiting, lines))
                waiting = []
                found.append(new)
        return found


_NOTHING = cst.SimpleWhitespace("")


def kept(
    before: Sequence[Any], after: Sequence[Any], removed: Callable[[Any], bool]
) -> tuple[list[Any], bool]:
    """Returns the elements that stay of arguments, parameters or elements, and whether any goes.

    A removed element's line goes with its comment. The line breaks around it are kept.
    """
    found: list[Any] = []
    for old, new in zip(before, after, strict=True):
        if not removed(old):
            found.append(new)
        elif found and hasattr(new, "comma"):
            is_last = old is before[-1]
            found[-1] = _closed(found[-1], new) if is_last else _followed(found[-1], new)
    return found, len(found) < len(before)


def _followed(element: Any, removed: Any) -> Any:
    """Returns an element with the line break that a removed one after it had before the next."""
    after, of_removed = (getattr(e.comma, "whitespace_after", _NOTHING) for e in (element, removed))
    if isinstance(of_removed, cst.ParenthesizedWhitespace):
        if isinstance(after, cst.ParenthesizedWhitespace):
            of_removed = of_removed.with_changes(first_line=after.first_line)
        comma = element.comma.with_changes(whitespace_after=of_removed)
        return element.with_changes(comma=comma)
    return element


def _closed(element: Any, removed: Any) -> Any:
    """Returns an element as the last one, in the place of a removed one."""
    own = getattr(element.comma, "whitespace_after", None)
    if isinstance(removed.comma, cst.Comma):
        after = removed.comma.whitespace_after
        if isinstance(own, cst.ParenthesizedWhitespace):
            if isinstance(after, cst.ParenthesizedWhitespace):
                after = after.with_changes(first_line=own.first_line)
            comma = element.comma.with_changes(whitespace_after=after)
            return element.with_changes(comma=comma)
    element = element.with_changes(comma=cst.MaybeSentinel.DEFAULT)
    for name in ("whitespace_after_arg", "whitespace_after_param"):
        if hasattr(removed, name):
            return element.with_changes(**{name: getattr(removed, name)})
    return element


def _speaks_of_dtypes(line: cst.EmptyLine) -> bool:
    words = ("dtype", "precision", "float", "bf16", "f32", "dynamic scale", "loss scale")
    return line.comment is not None and any(word in line.comment.value.lower() for word in words)


def _joined(
    waiting: Sequence[cst.EmptyLine], lines: Sequence[cst.EmptyLine]
) -> list[cst.EmptyLine]:
    """Joins leading lines: of several blank lines that meet, the longest group stays."""
    blanks = [line for line in waiting if line.comment is None]
    comments = [line for line in waiting if line.comment is not None]
    count = next((i for i, line in enumerate(lines) if line.comment is not None), len(lines))
    return [*(blanks[: max(0, len(blanks) - count)] if not comments else blanks), *comments, *lines]

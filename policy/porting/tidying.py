"""Lines that a port leaves behind: copies of a name, and values that are only returned.

Only lines that the port itself wrote or shortened are touched, and only where it is plain that the
program stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from policy.porting.edits import Edits, without_dtypes
from policy.porting.sources import ParsedFile, Written
from policy.porting.syntax import last_name, nodes_of

Line = cst.SimpleStatementLine
# what binds names, or leaves a block, in ways that are not followed here
_UNUSUAL = (cst.Del, cst.Match, cst.NamedExpr, cst.Nonlocal, cst.Global, cst.Try, cst.TryStar)
_READERS = ("locals", "vars", "eval", "exec")


def copy_edits(source: ParsedFile, written: Written) -> Edits:
    """Returns the edits that put ``x`` in the place of ``y`` after a new line ``y = x``."""
    edits = Edits()
    for line, after, block in _lines_of_functions(source):
        target, value = _assigned_name(line)
        is_said = _are_said([*line.leading_lines, line.trailing_whitespace])
        if target is None or source.line(target) not in written.lines or is_said:
            continue
        reads = _own_reads(source, target)
        is_once = len(source.assignments(target)) == 1 and bool(reads)
        # of a function's own block: in a loop, `x` may have another value in the next turn
        if not is_once or not isinstance(source.parent(block), cst.FunctionDef):
            continue
        if isinstance(value, cst.Name):
            nodes = [other.node for other in source.assignments(value)]
            is_safe = bool(nodes) and max(map(source.line, nodes)) < source.line(target)
            nodes += reads
        else:
            is_safe = _is_attribute(value) and len(reads) == 1 and _is_read_first(source, after)
            is_safe, nodes = is_safe and set(reads) <= set(nodes_of(after or line)), reads
        is_after = all(source.line(read) > source.line(target) for read in reads)
        if is_safe and is_after and not any(source.enclosing(n, Line) in edits for n in nodes):
            edits[line] = None
            edits.update((read, lambda _, value=value: value.deep_clone()) for read in reads)
    return edits


def return_edits(source: ParsedFile, written: Written) -> Edits:
    """Returns the edits of ``x = value; return x`` that lost a cast, or a line between the two."""
    edits = Edits()
    for line, after, block in _lines_of_functions(source):
        target, value = _assigned_name(line)
        last = after.body[0] if after is not None and len(after.body) == 1 else None
        if target is None or after is None or not isinstance(last, cst.Return):
            continue
        result, is_pair = last.value, False
        if isinstance(result, cst.Tuple) and isinstance(result.elements[0], cst.Element):
            is_pair = not result.lpar and not isinstance(value, cst.Tuple)
            result = result.elements[0].value if is_pair else None
        names = [n for n in nodes_of(last) if isinstance(n, cst.Name) and n.value == target.value]
        is_first = names == [result] and not getattr(result, "lpar", ())
        is_own = bool(_own_reads(source, target)) and not isinstance(value, cst.Yield)
        is_cut = any(source.last_line(line) <= cut < source.line(last) for cut in written.cuts)
        comments = [line.trailing_whitespace, *after.leading_lines, after.trailing_whitespace]
        is_said = _are_said(comments) or any(isinstance(n, cst.Comment) for n in nodes_of(last))
        is_new = after is block.body[-1] and (source.line(last) in written.lines or is_cut)
        if is_first and is_own and is_new and not is_said:
            edits[after] = None
            edits[line] = _returning(last if is_pair else None)
    return edits


def _returning(pair: cst.Return | None) -> Any:
    """Returns an edit of ``x = value`` to ``return value``, or of a pair to ``return value, y``."""

    def change(updated: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        value: Any = updated.body[0].value  # type: ignore[union-attr]
        if pair is not None and isinstance(pair.value, cst.Tuple):
            first, *rest = pair.value.elements
            value = pair.value.with_changes(elements=[first.with_changes(value=value), *rest])
        no_comment = cst.TrailingWhitespace(newline=updated.trailing_whitespace.newline)
        return updated.with_changes(body=[cst.Return(value=value)], trailing_whitespace=no_comment)

    return change


def _lines_of_functions(source: ParsedFile) -> Iterator[tuple[Line, Line | None, cst.BaseSuite]]:
    """Yields the lines of functions' bodies, each with the line after it in its block."""
    unusual = {
        function
        for n in nodes_of(source.module)
        if isinstance(n, _UNUSUAL) or (isinstance(n, cst.Call) and last_name(n.func) in _READERS)
        for function in source.ancestors(n)
    }
    for block in nodes_of(source.module):
        function = source.enclosing(block, cst.FunctionDef)
        if isinstance(block, cst.IndentedBlock) and function and function not in unusual:
            for line, after in zip(block.body, [*block.body[1:], None], strict=True):
                if isinstance(line, Line):
                    yield line, after if isinstance(after, Line) else None, block


def _assigned_name(line: Line) -> tuple[cst.Name | None, cst.BaseExpression]:
    """Returns the name and the value of a line ``name = value``; None of another line."""
    one = line.body[0]
    if len(line.body) == 1 and isinstance(one, cst.Assign) and len(one.targets) == 1:
        target = one.targets[0].target
        return (target if isinstance(target, cst.Name) else None), one.value
    return None, cst.Name("_")


def _own_reads(source: ParsedFile, target: cst.Name) -> list[cst.Name]:
    """Returns the reads of a variable; none if one is in another scope than its function's."""
    function = source.enclosing(target, cst.FunctionDef)
    bound = source.assignments(target)
    reads = [access.node for one in bound for access in one.references]
    inner = (cst.FunctionDef, cst.Lambda, cst.ClassDef, cst.BaseComp, cst.FormattedString)
    is_own = all(getattr(one.scope, "node", None) is function for one in bound)
    is_read = all(source.enclosing(n, *inner) is function for n in reads)
    is_named = all(isinstance(n, cst.Name) for n in reads)  # not in a text, as an annotation
    return reads if is_own and is_read and is_named else []


def _is_attribute(node: cst.BaseExpression) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
        if isinstance(node, cst.Name):
            return True
    return False


def _is_read_first(source: ParsedFile, line: Line | None) -> bool:
    """Returns whether a line calls functions of JAX and NumPy alone, which set no attribute."""
    nodes = [] if line is None else list(nodes_of(line))
    calls = [source.imported(n.func) for n in nodes if isinstance(n, cst.Call)]
    is_known = all(name.startswith(("jax.", "numpy.")) for name in calls)
    return is_known and not any(isinstance(n, (cst.Await, cst.Yield)) for n in nodes)


def _are_said(lines: Sequence[Any]) -> bool:
    """Returns whether comments are among lines that do not speak of dtypes."""
    return any(line.comment is not None for line in without_dtypes(lines))

"""Lines that a port leaves behind: copies of a name, values that are only returned, and brackets
that fit on one line.

Only lines that the port itself wrote or shortened are touched.
"""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from policy.porting.edits import Edits, without_dtypes
from policy.porting.sources import ParsedFile, matched_lines
from policy.porting.syntax import nodes_of


class Written:
    """The lines of a text, from 1, that are not those of the text before it.

    Attributes:
      lines: that are new or changed.
      cuts: after which lines were deleted.
    """

    def __init__(self, before: str, after: str):
        opcodes = matched_lines(before.splitlines(), after.splitlines()).get_opcodes()
        changed = [places for tag, *places in opcodes if tag != "equal"]
        self.lines = {line + 1 for _, _, j, end in changed for line in range(j, end)}
        self.cuts = {end for i, i_end, j, end in changed if i_end - i > end - j}

    def within(self, first: int, last: int) -> bool:
        """Returns whether a range of lines has a new one, or lost one between two of its lines."""
        is_new = any(first <= line <= last for line in self.lines)
        return is_new or any(first <= line < last for line in self.cuts)


# --------------------------------------------------------------------------------------------------
# Copies of a name, and values that are only returned
# --------------------------------------------------------------------------------------------------


def copy_edits(source: ParsedFile, written: Written) -> Edits:
    """Returns the edits that put ``x`` in the place of ``y`` after a new line ``y = x``."""
    edits = Edits()
    for line, after in _lines_of_functions(source):
        target, value = _assigned_name(line)
        if target is None or source.line(target) not in written.lines or _has_comment(line):
            continue
        reads = _own_reads(source, target)
        if not reads or len(source.assignments(target)) > 1:
            continue
        if isinstance(value, cst.Name):
            nodes = [other.node for other in source.assignments(value)]
            is_safe = bool(nodes) and max(map(source.line, nodes)) < source.line(target)
            nodes += reads
        else:
            is_next = after is not None and set(reads) <= set(nodes_of(after))
            is_safe, nodes = _is_attribute(value) and is_next and len(reads) == 1, reads
        is_after = all(source.line(read) > source.line(target) for read in reads)
        if is_safe and is_after and not any(source.enclosing(n, Line) in edits for n in nodes):
            edits[line] = None
            edits.update((read, lambda _, value=value: value.deep_clone()) for read in reads)
    return edits


def return_edits(source: ParsedFile, written: Written) -> Edits:
    """Returns the edits of ``x = value; return x`` that lost a cast, or a line between the two."""
    edits = Edits()
    for line, after in _lines_of_functions(source):
        target, value = _assigned_name(line)
        last = after.body[0] if after is not None and len(after.body) == 1 else None
        if target is None or after is None or not isinstance(last, cst.Return):
            continue
        parts = _elements(last.value) or [last.value]
        names = [n for n in nodes_of(last) if isinstance(n, cst.Name) and n.value == target.value]
        is_first = names == parts[:1] and (len(parts) == 1 or not _elements(value))
        is_own = source.enclosing(line, cst.Try) is None and bool(_own_reads(source, target))
        end = source.line(last)
        is_cut = any(source.last_line(line) <= cut < end for cut in written.cuts)
        is_new = end in written.lines or is_cut
        is_said = _are_said(after.leading_lines) or _has_comment(line) or _has_comment(after)
        if is_first and is_own and is_new and not is_said and not isinstance(value, cst.Yield):
            edits[after] = None
            edits[line] = _returning(last)
    return edits


def _returning(last: cst.Return) -> Any:
    def change(updated: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        value: Any = updated.body[0].value  # type: ignore[union-attr]
        if isinstance(last.value, cst.Tuple):
            first, *rest = last.value.elements
            value = last.value.with_changes(elements=[first.with_changes(value=value), *rest])
        no_comment = cst.TrailingWhitespace()
        return updated.with_changes(body=[cst.Return(value=value)], trailing_whitespace=no_comment)

    return change


Line = cst.SimpleStatementLine


def _lines_of_functions(source: ParsedFile) -> Iterator[tuple[Line, Line | None]]:
    """Yields the lines of functions' bodies, each with the line after it in its block."""
    for block in nodes_of(source.module):
        if isinstance(block, cst.IndentedBlock) and source.enclosing(block, cst.FunctionDef):
            for line, after in zip(block.body, [*block.body[1:], None], strict=True):
                if isinstance(line, Line):
                    yield line, after if isinstance(after, Line) else None


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
    inner = (cst.FunctionDef, cst.Lambda, cst.ClassDef, cst.BaseComp)
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


def _elements(node: cst.BaseExpression | None) -> list[cst.BaseExpression]:
    """Returns the elements of a tuple without parentheses."""
    if not isinstance(node, cst.Tuple) or node.lpar:
        return []
    return [element.value for element in node.elements]


def _has_comment(line: Line) -> bool:
    """Returns whether a comment that does not speak of dtypes stands at the end of a line."""
    return _are_said([line.trailing_whitespace])


def _are_said(lines: Sequence[Any]) -> bool:
    return any(line.comment is not None for line in without_dtypes(lines))


# --------------------------------------------------------------------------------------------------
# Brackets
# --------------------------------------------------------------------------------------------------

_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "return")
_WIDTHS = (79, 80, 88, 100, 119, 120)  # that formatters and linters take


def joined(before: str, after: str) -> str:
    """Puts brackets that lost something on one line, where it fits the width of the file.

    Brackets with a comma before their end or a comment stay, as formatters leave them.
    """
    width, made = _width(before), after
    while True:
        lines, done = made.splitlines(keepends=True), len(made)
        short = _short_brackets(made, Written(before, made), width)
        for first, last, line in sorted(short, reverse=True):
            if last <= done:  # else it is in one that is joined already, or around it
                end = lines[last - 1]
                lines[first - 1 : last] = [line + end[len(end.rstrip("\r\n")) :]]
                done = first - 1
        text = "".join(lines)
        if text == made or ast.dump(ast.parse(text)) != ast.dump(ast.parse(after)):
            return made
        made = text


def _width(text: str) -> int:
    """Returns the least usual width of 99 in 100 of the lines that have no text and no comment."""
    plain = sorted(len(line) for line in text.splitlines() if not set("#'\"") & set(line))
    longest = plain[len(plain) * 99 // 100] if plain else 0
    return next((width for width in _WIDTHS if longest <= width), _WIDTHS[-1])


def _short_brackets(text: str, written: Written, width: int) -> Iterator[tuple[int, int, str]]:
    """Yields the first and last line of brackets over several lines, and these as one line."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines, stack, found = text.splitlines(), [], []
    for i, token in enumerate(tokens):
        if token.type == tokenize.OP and token.string in _OPENING:
            stack.append(i)
        elif token.type == tokenize.OP and token.string in _CLOSING:
            found.append((stack.pop(), i, len(stack)))
    for start, end, depth in sorted(found, key=lambda one: one[2]):
        first, last = tokens[start].start[0], tokens[end].start[0]
        inner = tokens[start + 1 : end]
        may_join = _is_ended(tokens, end) and _may_join(inner, tokens[end])
        if first < last and may_join and written.within(first, last):
            line = _one_line(lines[first - 1 : last])
            if depth == 0 and _is_needless(tokens, start, end):
                column = tokens[start].start[1]
                line = line[:column] + line[column + 1 :].rstrip().removesuffix(")")
            if len(line) <= width:
                yield first, last, line


def _is_ended(tokens: Sequence[tokenize.TokenInfo], end: int) -> bool:
    """Returns whether all brackets that open behind another one close on its last line."""
    depth, row = 0, tokens[end].start[0]
    for token in tokens[end + 1 :]:
        if token.start[0] != row:
            break
        depth += (token.string in _OPENING) - (token.string in _CLOSING)
        if token.type == tokenize.COMMENT:
            return False
    return depth <= 0


def _may_join(inner: Sequence[tokenize.TokenInfo], end: tokenize.TokenInfo) -> bool:
    kept = [token for token in inner if token.type != tokenize.NL]
    pairs = itertools.pairwise([*kept, end])
    is_closed = any(a.string == "," and b.string in _CLOSING for a, b in pairs)
    is_broken = any(a.type == tokenize.COMMENT or a.start[0] != a.end[0] for a in kept)
    return bool(kept) and not is_closed and not is_broken


def _one_line(lines: Sequence[str]) -> str:
    result = lines[0].rstrip()
    for line in map(str.strip, lines[1:]):
        is_tight = result.endswith(_OPENING) or line.startswith(_CLOSING)
        result += line if is_tight else f" {line}"
    return result


def _is_needless(tokens: Sequence[tokenize.TokenInfo], start: int, end: int) -> bool:
    """Returns whether parentheses around an assigned or returned value only hold its lines."""
    inner = tokens[start + 1 : end]
    is_value = tokens[start - 1].string in _ASSIGNS and tokens[end + 1].type == tokenize.NEWLINE
    depth, outer = 0, set[str]()
    for token in inner:
        depth -= token.string in _CLOSING
        outer |= set() if depth else {token.string}
        depth += token.string in _OPENING
    is_tuple = bool(outer & {",", "for", "yield", ":="})
    return tokens[start].string == "(" and is_value and not is_tuple

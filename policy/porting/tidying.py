"""Lines that a port leaves behind: copies of a name, values that are only returned, and brackets
that fit on one line.

Only lines that the port itself wrote or shortened are touched, and only where it is plain that the
program stays the same.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from policy.porting.edits import Edits, without_dtypes
from policy.porting.sources import ParsedFile, matched_lines
from policy.porting.syntax import last_name, nodes_of


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


def has_plain_lines(text: str) -> bool:
    """Returns whether all line breaks are those that Python's tokens have."""
    return text.splitlines() == text.replace("\r\n", "\n").removesuffix("\n").split("\n")


# --------------------------------------------------------------------------------------------------
# Copies of a name, and values that are only returned
# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# Brackets
# --------------------------------------------------------------------------------------------------

_OPENING, _CLOSING = ("(", "[", "{"), (")", "]", "}")
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "return")
_WIDTHS = (79, 80, 88, 100, 119, 120)  # that formatters and linters take


def with_short_brackets_joined(before: str, after: str) -> str:
    """Puts brackets that lost something on one line, where it fits the width of the file.

    Brackets with a comma before their end or a comment stay, as formatters leave them.
    """
    tree = _tree(after)
    if after == before or tree is None or "# fmt: off" in after:
        return after
    width, made = _width(before), after
    while True:
        lines, done = made.split("\n"), len(made)
        short = _short_brackets(made, Written(before, made), width)
        for first, last, line in sorted(short, reverse=True):
            if last <= done:  # else it is in one that is joined already, or around it
                lines[first - 1 : last] = [line + "\r" * lines[last - 1].endswith("\r")]
                done = first - 1
        text = "\n".join(lines)
        if text == made or _tree(text) != tree:
            return made
        made = text


def _tree(text: str) -> str | None:
    """Returns the syntax tree of a text as this version of Python reads it, or None."""
    with warnings.catch_warnings(action="ignore"):  # of the file's own escapes
        try:
            return ast.dump(ast.parse(text))
        except (SyntaxError, ValueError):
            return None


def _width(text: str) -> int:
    """Returns the least usual width of 99 in 100 of the lines that have no text and no comment."""
    plain = sorted(len(line) for line in text.splitlines() if not set("#'\"") & set(line))
    longest = plain[len(plain) * 99 // 100] if plain else 0
    return next((width for width in _WIDTHS if longest <= width), _WIDTHS[-1])


def _short_brackets(text: str, written: Written, width: int) -> Iterator[tuple[int, int, str]]:
    """Yields the first and last line of brackets over several lines, and these as one line."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines, stack, found = text.split("\n"), [], []
    for i, token in enumerate(tokens):
        if token.type == tokenize.OP and token.string in _OPENING:
            stack.append(i)
        elif token.type == tokenize.OP and token.string in _CLOSING:
            found.append((stack.pop(), i, len(stack)))
    rows = [(tokens[start].start[0], tokens[end].start[0]) for start, end, _ in found]
    kept = [
        (first, last)
        for (start, _, _), (first, last) in zip(found, rows, strict=True)
        # what stands behind a list on its last line is not of the list
        if first < last and not written.within(first, last - _is_display(tokens, start))
    ]
    for (start, end, depth), (first, last) in zip(found, rows, strict=True):
        is_whole = not any(first <= a and b <= last for a, b in kept)
        may_join = first < last and is_whole and _may_join(tokens, start, end)
        if may_join and not any(line.rstrip().endswith("\\") for line in lines[first - 1 : last]):
            line = _one_line(lines[first - 1 : last])
            if depth == 0 and _is_needless(tokens, start, end):
                column = tokens[start].start[1]
                line = line[:column] + line[column + 1 :].rstrip().removesuffix(")")
            if len(line) <= width:
                yield first, last, line


def _is_display(tokens: Sequence[tokenize.TokenInfo], start: int) -> bool:
    """Returns whether a bracket opens a list, a set or a dict, as rows of a matrix."""
    before = tokens[start - 1]
    is_index = before.type in (tokenize.NAME, tokenize.STRING) or before.string in _CLOSING
    return tokens[start].string == "{" or (tokens[start].string == "[" and not is_index)


def _may_join(tokens: Sequence[tokenize.TokenInfo], start: int, end: int) -> bool:
    """Returns whether brackets have no comment, no comma at their end and no text of several lines,
    and those that open behind them close on their last line.
    """
    kept = [token for token in tokens[start + 1 : end + 1] if token.type != tokenize.NL]
    is_closed = any(a.string == "," and b.string in _CLOSING for a, b in itertools.pairwise(kept))
    row = tokens[end].start[0]
    behind = list(itertools.takewhile(lambda token: token.start[0] == row, tokens[end + 1 :]))
    depth = sum((t.string in _OPENING) - (t.string in _CLOSING) for t in behind)
    is_said = any(token.type == tokenize.COMMENT for token in (*kept, *behind))
    is_broken = any(token.start[0] != token.end[0] for token in kept)
    return len(kept) > 1 and not is_closed and not is_said and not is_broken and depth <= 0


def _one_line(lines: Sequence[str]) -> str:
    result = lines[0].rstrip()
    for line in map(str.strip, lines[1:]):
        is_tight = result.endswith(_OPENING) or re.match(r"[)\]}]|\.[^\W\d]", line)
        result += line if is_tight else f" {line}"
    return result


def _is_needless(tokens: Sequence[tokenize.TokenInfo], start: int, end: int) -> bool:
    """Returns whether parentheses around an assigned or returned value only hold its lines."""
    is_value = tokens[start - 1].string in _ASSIGNS and tokens[end + 1].type == tokenize.NEWLINE
    depth, outer = 0, set[str]()
    for token in tokens[start + 1 : end]:
        depth -= token.string in _CLOSING
        outer |= set() if depth else {token.string}
        depth += token.string in _OPENING
    is_tuple = bool(outer & {",", "for", "yield", ":="})
    return tokens[start].string == "(" and is_value and not is_tuple

"""Brackets over several lines, which fit on one line after a port.

Only brackets that lost something are touched.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence

from policy.porting.sources import Written

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

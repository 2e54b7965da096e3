"""An audit as text for a terminal: findings first, then the modules as a tree."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from policy.inspect.audit.operations import (
    AuditFigures,
    Finding,
    ModuleNode,
    Operation,
    attention_programs,
    is_matmul_operation,
    operation_name,
    tree_of,
)
from policy.inspect.render.table import Column, Side, Table
from policy.inspect.render.text import Paint, amount, short
from policy.programs.dtypes import HALVES
from policy.programs.primitives import OPERATION_KINDS

_LISTED = tuple(kind for kind in OPERATION_KINDS if kind not in ("cast", "other"))
_WIDTH = 118
_FEW = 10  # numbers that a pattern lists one by one


def text(audit: AuditFigures, *, color: bool = False) -> str:
    """Returns an audit as text: a summary, its findings, and a tree of the modules.

    Modules whose names differ in a number and whose contents are equal are shown as one pattern, as
    rules take it: ``block_[0-3]``. Operations that neither multiply nor sum, and casts, are counted
    in the figures and not listed.
    """
    paint = Paint(color)
    parts = [_summary(audit, paint), _findings(audit, paint), _tree(audit.operations, paint)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


# --------------------------------------------------------------------------------------------------
# Summary and findings
# --------------------------------------------------------------------------------------------------


def _summary(audit: AuditFigures, paint: Paint) -> Iterator[str]:
    count = len(audit.findings)
    clean = "no findings" if audit.policy else "no findings, and no policy was in force"
    found = f"{count} finding{'s' * (count > 1)}"
    verdict = paint("bad", found) if count else paint("good", clean)
    yield f"{paint('bold', f'audit of {audit.name}' if audit.name else 'audit')}: {verdict}"
    flops, moved = audit.flops_by_dtype, audit.bytes_by_dtype
    for what, unit, shares in ("FLOPs", "FLOP", flops), ("bytes", "B", moved):
        line = f"  {what:<6} {amount(sum(shares.values()), unit):>10}  {_shares(shares)}"
        yield line.rstrip()
    if audit.eight_bit_matmul_share:
        share, each = audit.eight_bit_matmul_share, _shares(audit.matmul_flops_by_dtype)
        yield f"  matmuls in 8 bits: {share:.1%} of their FLOPs ({each})"
    if any(map(is_matmul_operation, audit.operations)):
        yield f"  matmuls in float32 or wider: {audit.f32_matmul_share:.1%} of their FLOPs"
    for program, paths in attention_programs(audit).items():
        yield f"  attention by {program}: {folded_pattern(paths)}"


def _shares(amounts: Mapping[str, int]) -> str:
    total = sum(amounts.values())
    return ", ".join(f"{short(dtype)} {part / total:.1%}" for dtype, part in amounts.items())


_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d*)(?!\d)")


def folded_pattern(paths: Iterable[str], among: Iterable[str] = ()) -> str:
    r"""Returns paths that differ in numbers only as one pattern for rules, or as several if one
    would match other paths.

    >>> folded_pattern(["block_0/Dense_0", "block_1/Dense_0"])
    'block_[0-1]/Dense_0'

    Args:
      among: all existing paths; if the given ones are all of their form, ``\\d+`` stands for more
        than ten numbers.
    """
    groups, known = _by_form(paths), _by_form(among)
    patterns: list[str] = []
    for between, rows in groups.items():
        patterns += _patterns(between, rows, is_all=set(rows) == set(known.get(between, ())))
    return ", ".join(patterns)


Form = tuple[str, ...]
"""A path without its numbers: ``("block_", "/Dense_", "")``."""


def _form(path: str) -> Form:
    return tuple(_NUMBER.split(path))


def _by_form(paths: Iterable[str]) -> dict[Form, list[tuple[int, ...]]]:
    """Returns the numbers in paths, by their forms."""
    groups: dict[Form, list[tuple[int, ...]]] = {}
    for path in dict.fromkeys(paths):
        groups.setdefault(_form(path), []).append(tuple(map(int, _NUMBER.findall(path))))
    return groups


def _patterns(between: Form, rows: list[tuple[int, ...]], is_all: bool = False) -> list[str]:
    """Returns patterns for paths of one form with the numbers `rows`.

    There are several if a combination of numbers is missing.
    """
    columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
    is_many = is_all and any(len(column) > _FEW for column in columns)
    if not is_many and math.prod(map(len, columns)) != len(rows):
        differing = next(i for i, column in enumerate(columns) if len(column) > 1)
        apart = ([row for row in rows if row[differing] == number] for number in columns[differing])
        return [pattern for alike in apart for pattern in _patterns(between, alike)]
    spans = [r"\d+" if is_many and column[1:] else _span(column) for column in columns]
    escaped = map(re.escape, between) if len(rows) > 1 else between  # a single path is no pattern
    return ["".join(map("".join, itertools.zip_longest(escaped, spans, fillvalue="")))]


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] < 10 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"[{numbers[0]}-{numbers[-1]}]"
    return f"(?:{'|'.join(map(str, numbers))})"


def _findings(audit: AuditFigures, paint: Paint) -> Iterator[str]:
    groups: dict[Any, list[Finding]] = {}
    for f in audit.findings:
        key = (f.kind, _form(f.path), f.primitive, f.dtypes, f.source, f.is_backward)
        groups.setdefault(key, []).append(f)
    if groups:
        yield paint("bold", "findings")
    for found in groups.values():
        first, times = found[0], sum(finding.count for finding in found)
        where = folded_pattern((finding.path for finding in found), audit.paths) or "(top level)"
        said = f"{first.primitive} {', '.join(map(short, first.dtypes))}"
        marks = " backward" * first.is_backward + (f" x{times}" if times > 1 else "")
        kind, place = paint("bad", first.kind), paint("bold", where)
        yield f"  {kind}  {place}  {said}{paint('dim', marks)}"
        line = f"{first.source}: {first.message}" if first.source else first.message
        yield from textwrap.wrap(line, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


# --------------------------------------------------------------------------------------------------
# The tree
# --------------------------------------------------------------------------------------------------


def _tree(operations: tuple[Operation, ...], paint: Paint) -> Iterator[str]:
    root = tree_of(operations)
    lines = list(_lines(root, 0, root.flops))
    if not lines:
        return
    names, listed = zip(*lines, strict=True)
    styles = ["dim" if op is None or op.accumulation not in HALVES else "warn" for op in listed]

    def column(head: str, value: Callable[[Operation], str], side: Side, width: int) -> Column:
        cells = ["" if op is None else value(op) for op in listed]
        return Column(head, cells, side=side, width=width, styles=styles)

    columns = (
        column("operands", _operands, "<", 14),
        column("sums in", lambda op: short(op.accumulation), "<", 7),
        column("result", lambda op: short(op.result), "<", 6),
        column("runs", lambda op: str(op.count), ">", 9),
        column("FLOPs", lambda op: amount(op.flops), ">", 7),
        column("bytes", lambda op: amount(op.bytes), ">", 7),
    )
    bold = ["bold" if op is None else "" for op in listed]
    table = Table("operations", names, columns, _WIDTH, bold, longest=44, least=44)
    yield from table.text(color=paint.color).splitlines()


def _operands(op: Operation) -> str:
    """Returns the dtypes of the first two operands, and whether there are more."""
    return " ".join(map(short, op.operands[:2])) + (" .." if len(op.operands) > 2 else "")


def _rows(module: ModuleNode) -> list[Operation]:
    """Returns the operations in a module itself; those of one kind and dtypes are one."""
    rows: dict[Operation, Operation] = {}
    for op in module.operations:
        key = dataclasses.replace(op, path="", source="", count=0, flops=0, bytes=0)
        row = rows.get(key, key)
        count, flops, moved = row.count + op.count, row.flops + op.flops, row.bytes + op.bytes
        rows[key] = dataclasses.replace(row, count=count, flops=flops, bytes=moved)
    return sorted(
        (row for row in rows.values() if row.kind in _LISTED),
        key=lambda op: (_LISTED.index(op.kind), op.is_backward, operation_name(op), op.operands),
    )


def _contents(module: ModuleNode) -> Any:
    """Returns a key that is equal for modules with the same lines."""
    children = ((name, _contents(child)) for name, child in module.children.items())
    return tuple(_rows(module)), tuple(children)


def _lines(module: ModuleNode, depth: int, total: int) -> Iterator[tuple[str, Operation | None]]:
    """Yields the lines of a module: of each operation with its name, of each module with None."""
    indent = "  " * depth
    for op in _rows(module):
        yield f"{indent}{operation_name(op)}{' backward' * op.is_backward}", op
    # Modules of equal content whose names differ in a number.
    alike: dict[Any, tuple[list[str], ModuleNode]] = {}
    for name, child in module.children.items():
        alike.setdefault((_form(name), _contents(child)), ([], child))[0].append(name)
    for names, child in alike.values():
        flops = child.flops * len(names)
        share = f"  {flops / total:.1%} of FLOPs" if total and flops else ""
        share += f"; matmuls: {child.matmul_shares}" if child.matmul_shares else ""
        yield f"{indent}{folded_pattern(names, module.children)}{share}", None
        yield from _lines(child, depth + 1, total)

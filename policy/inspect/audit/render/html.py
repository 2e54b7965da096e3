"""Renders an audit, and optionally a comparison, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from policy.inspect.audit.finding_kinds import FINDING_KINDS
from policy.inspect.audit.render.tree import ModuleNode, tree_of
from policy.inspect.audit.report import is_matmul_operation, operation_name
from policy.inspect.render.document import html_document, search_box, section
from policy.inspect.render.markup import Markup, join_markup, tag
from policy.inspect.render.parts import (
    OUTSIDE,
    Cell,
    bar,
    chip,
    chips,
    colour,
    figure,
    link,
    pieces,
    table,
)
from policy.inspect.render.units import amount

if TYPE_CHECKING:
    from policy.inspect.audit.report import Audit, Finding, Operation
    from policy.inspect.compare.comparison import Comparison, OperandCodes, Row

_PLACES = 6  # how many places of one finding are shown at once


def page(audit: Audit, comparison: Comparison | None = None) -> str:
    """Returns the page of an audit: findings, tree of modules, shares by dtype and operations.

    It contains its own style and scripts and fetches nothing; names from the program are escaped.
    It is readable without scripts, which only sort, search and open the targets of links.

    Args:
      audit: the result of `policy.audit`.
      comparison: the result of `policy.compare` for the same function.
    """
    tree = tree_of(audit.operations, audit.findings)
    name = audit.name or "A function"
    header = (
        tag("h1", name),
        _summary(audit),
        search_box("path, primitive, dtype, source …"),
    )
    return html_document(f"Audit of {name}", header, _sections(audit, tree, comparison))


def _sections(audit: Audit, tree: ModuleNode, comparison: Comparison | None) -> Iterable[Markup]:
    yield section(
        "findings",
        f"Findings ({len(audit.findings)})",
        _findings(audit.findings, tree, audit.policy),
    )
    shares = join_markup(
        (
            bar("FLOPs", audit.flops_by_dtype, amount),
            *_of_matmuls(audit),
            bar("Bytes", audit.bytes_by_dtype, _memory),
        )
    )
    yield section("shares", "Shares by dtype", shares)
    buttons = tag(
        "p",
        tag("button", "Unfold all", type="button", data_fold="open"),
        " ",
        tag("button", "Fold all", type="button", data_fold="closed"),
        class_="buttons",
    )
    total = max(sum(tree.flops.values()), 1)
    yield section(
        "modules", "Modules", buttons, tag("div", _node(tree, total, depth=0), class_="tree")
    )
    if comparison is not None:
        yield section("comparison", "Against float32", *_comparison(comparison, tree))
    yield section(
        "operations", f"Operations ({len(audit.operations)})", _operations(audit.operations, tree)
    )


def _of_matmuls(audit: Audit) -> Iterable[Markup]:
    if audit.eight_bit_matmul_share:
        yield bar("FLOPs of matmuls", audit.matmul_flops_by_dtype, amount)


def _summary(audit: Audit) -> Markup:
    matmuls = [op for op in audit.operations if is_matmul_operation(op)]
    share = (
        f"{audit.f32_matmul_share:.0%} of matmul FLOPs in float32 or wider"
        if matmuls
        else "no matmul"
    )
    eight = audit.eight_bit_matmul_share
    found = len(audit.findings)
    parts = (
        f"{found} finding{'' if found == 1 else 's'}",
        f"{amount(sum(audit.flops_by_dtype.values()))} FLOPs",
        *([f"{eight:.0%} of matmul FLOPs in 8 bits"] if eight else []),
        share,
    )
    return tag("p", " · ".join(parts), class_="summary")


# --------------------------------------------------------------------------------------------------
# Findings and shares
# --------------------------------------------------------------------------------------------------


def _findings(findings: Sequence[Finding], tree: ModuleNode, policy: str) -> Markup:
    if not findings:
        return tag("p", "None." if policy else "None, and no policy was in force.", class_="clean")
    ids = tree.ids()
    # the gravest first, as the audit has them
    kinds = dict.fromkeys(finding.kind for finding in findings)
    return join_markup(
        _findings_of(kind, [f for f in findings if f.kind == kind], ids) for kind in kinds
    )


def _findings_of(kind: str, findings: Sequence[Finding], ids: Mapping[str, str]) -> Markup:
    """Renders findings of one kind.

    Findings that differ in their place only, as in repeated layers, are one item.
    """
    said: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (
            finding.primitive,
            finding.dtypes,
            finding.message,
            finding.source,
            finding.is_backward,
        )
        said.setdefault(key, []).append(finding)
    title = tag("summary", tag("strong", kind), f" ({len(findings)})")
    meaning = tag("p", FINDING_KINDS[kind], class_="meaning") if kind in FINDING_KINDS else ""
    items = [_finding(alike, ids) for alike in said.values()]
    return tag("details", title, meaning, tag("ul", *items), class_="kind", open=True)


def _finding(alike: Sequence[Finding], ids: Mapping[str, str]) -> Markup:
    finding = alike[0]
    direction = tag("span", "backward", class_="mark") if finding.is_backward else ""
    what = join_markup((tag("code", finding.primitive), " ", *chips(finding.dtypes), direction))
    places = [tag("li", _place(one, ids)) for one in alike]
    return tag(
        "li",
        tag("div", what, " ", tag("span", finding.source, class_="source")),
        tag("div", finding.message),
        tag("ul", *places[:_PLACES], class_="places"),
        tag(
            "details",
            tag("summary", f"{len(places) - _PLACES} more"),
            tag("ul", *places[_PLACES:], class_="places"),
        )
        if len(places) > _PLACES
        else "",
        class_="finding",
    )


def _place(finding: Finding, ids: Mapping[str, str]) -> Markup:
    times = f" {finding.count:,} times" if finding.count != 1 else ""
    return join_markup(
        (tag("a", finding.path or OUTSIDE, href=f"#{ids[finding.path]}", class_="path"), times)
    )


# --------------------------------------------------------------------------------------------------
# The tree
# --------------------------------------------------------------------------------------------------


def _node(node: ModuleNode, total: int, *, depth: int) -> Markup:
    """Renders a module with those below it, as `details` that fold without scripts too."""
    summary = tag("summary", *_of_node(node, total), class_=colour(node.dtype))
    children = [_node(child, total, depth=depth + 1) for child in node.children.values()]
    rows = (
        f"{len(node.operations)} row{'' if len(node.operations) == 1 else 's'} "
        f"{'here' if node.path else OUTSIDE}"
    )
    shown = tag("button", f"Show {rows}", type="button", data_search=node.path or OUTSIDE)
    own = tag("p", shown, class_="own") if node.operations else ""
    is_open = depth < 2 or (depth == 2 and node.findings > 0)
    return tag(
        "details",
        summary,
        own,
        *children,
        id=node.id,
        open=is_open,
        data_path=node.path,
        class_="node",
    )


def _of_node(node: ModuleNode, total: int) -> Iterable[Markup]:
    flops = sum(node.flops.values())
    yield tag("span", node.name or "all", class_="name")
    yield join_markup(chip(dtype) for dtype in node.dtypes)
    if flops:
        yield tag("span", f"{flops / total:.1%} of FLOPs", class_="amount")
        yield tag(
            "span",
            *pieces(dict(node.flops.most_common()), total),
            class_="bar small",
            aria_hidden="true",
        )
    if node.matmul_shares:
        yield tag("span", f"matmuls: {node.matmul_shares}", class_="amount")
    if node.findings:
        yield tag(
            "span", f"{node.findings} finding{'' if node.findings == 1 else 's'}", class_="mark"
        )


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def _operations(operations: Sequence[Operation], tree: ModuleNode) -> Markup:
    columns = (
        "path",
        "kind",
        "primitive",
        "operands",
        "accumulation",
        "result",
        "pass",
        "runs",
        "FLOPs",
        "bytes",
    )
    ids = tree.ids()
    return table((*columns, "source"), (_operation(op, ids) for op in operations))


def _operation(op: Operation, ids: Mapping[str, str]) -> Sequence[Cell]:
    return (
        (link(op.path, ids), None),
        (op.kind, None),
        (tag("code", operation_name(op)), None),
        (join_markup(chips(op.operands)), None),
        (chip(op.accumulation), None),
        (chip(op.result), None),
        ("backward" if op.is_backward else "forward", None),
        (f"{op.count:,}", op.count),
        (amount(op.flops), op.flops),
        (_memory(op.bytes), op.bytes),
        (tag("span", op.source, class_="source"), None),
    )


def _comparison(comparison: Comparison, tree: ModuleNode) -> Iterable[Markup]:
    ids = tree.ids()
    policy = f", under {comparison.policy}" if comparison.policy else ""
    jump = comparison.first_jump
    told = (
        "The error jumps nowhere."
        if jump is None
        else join_markup(("The error jumps first at ", link(jump, ids), "."))
    )
    step = f" In step {comparison.jump_step} of a scan." if comparison.jump_step is not None else ""
    yield tag(
        "p",
        f"Worst error of the outputs{policy}: {figure(comparison.error, '.3g')}. ",
        told,
        step,
    )
    if comparison.notes:
        yield tag("ul", *(tag("li", note) for note in comparison.notes))
    yield tag("div", Markup(comparison.to_svg()), class_="drawing")
    columns = (
        "path",
        "values",
        "dtype",
        "error",
        "cosine",
        "underflow",
        "subnormal",
        "overflow",
        "of limit",
    )
    yield table(columns, (_compared(row, ids) for row in comparison.rows))
    if comparison.codes:
        columns = ("path", "operand", "dtype", "saturated", "underflow")
        yield tag("h3", "Operands in 8 bits")
        yield table(columns, (_of_codes(codes, ids) for codes in comparison.codes))


def _of_codes(codes: OperandCodes, ids: Mapping[str, str]) -> Sequence[Cell]:
    return (
        (link(codes.path, ids), None),
        (codes.operand, None),
        (chip(codes.dtype), None),
        (figure(codes.saturated, ".2%"), codes.saturated),
        (figure(codes.underflow, ".2%"), codes.underflow),
    )


def _compared(row: Row, ids: Mapping[str, str]) -> Sequence[Cell]:
    mark = tag("span", "jump", class_="mark") if row.is_jump else ""
    # others are named, as the function's result is not
    of_module = row.kind in ("activation", "gradient")
    where = link(row.path, ids) if of_module else tag("code", row.path or "the result")
    return (
        (join_markup((where, " ", mark)), None),
        (row.kind, None),
        (chip(row.dtype), None),
        (figure(row.error, ".2e"), row.error),
        (figure(row.cosine, ".6f"), row.cosine),
        (figure(row.underflow, ".2%"), row.underflow),
        (figure(row.subnormal, ".2%"), row.subnormal),
        (figure(row.overflow, ".2%"), row.overflow),
        (figure(row.headroom, ".2%"), row.headroom),
    )


def _memory(number: float) -> str:
    return amount(number, "B", binary=True)

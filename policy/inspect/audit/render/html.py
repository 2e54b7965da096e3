"""Renders an audit, and optionally a comparison, as one self-contained HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from policy.inspect.audit.findings import FINDING_KINDS
from policy.inspect.audit.operations import (
    AuditFigures,
    Finding,
    ModuleNode,
    is_matmul_operation,
    operation_name,
    tree_of,
)
from policy.inspect.compare.comparison import Comparison, Row
from policy.inspect.render.html import (
    OUTSIDE,
    Cell,
    Columns,
    Markup,
    bar,
    chip,
    colour,
    figure,
    html_document,
    join_markup,
    link,
    pieces,
    search_box,
    section,
    table,
    tag,
)
from policy.inspect.render.text import amount, bytes_text

_PLACES = 6  # how many places of one finding are shown at once


def page(audit: AuditFigures, comparison: Comparison | None = None) -> str:
    """Returns the page of an audit: findings, tree of modules, shares by dtype and operations.

    It contains its own style and scripts and fetches nothing; names from the program are escaped.
    It is readable without scripts, which only sort, search and open the targets of links.

    Args:
      audit: the result of `policy.audit`.
      comparison: the result of `policy.compare` for the same function.
    """
    tree = tree_of(audit.operations, audit.findings)
    name = audit.name or "A function"
    header = tag("h1", name), _summary(audit), search_box("path, primitive, dtype, source …")
    return html_document(f"Audit of {name}", header, _sections(audit, tree, comparison))


def _sections(
    audit: AuditFigures, tree: ModuleNode, comparison: Comparison | None
) -> Iterable[Markup]:
    clean = "None." if audit.policy else "None, and no policy was in force."
    found = _findings(audit.findings, tree.ids()) or [tag("p", clean, class_="clean")]
    yield section("findings", f"Findings ({len(audit.findings)})", *found)
    shares = [bar("FLOPs", audit.flops_by_dtype, amount)]
    if audit.eight_bit_matmul_share:
        shares.append(bar("FLOPs of matmuls", audit.matmul_flops_by_dtype, amount))
    shares.append(bar("Bytes", audit.bytes_by_dtype, bytes_text))
    yield section("shares", "Shares by dtype", *shares)
    if audit.attention:
        rows = [(link(path, tree.ids()), program) for path, program in audit.attention.items()]
        items = [tag("li", path, " by ", program) for path, program in rows]
        yield section("attention", "Attention", tag("ul", *items))
    unfold = tag("button", "Unfold all", type="button", data_fold="open")
    fold = tag("button", "Fold all", type="button", data_fold="closed")
    buttons = tag("p", unfold, " ", fold, class_="buttons")
    modules = _node(tree, max(tree.flops, 1), depth=0)
    yield section("modules", "Modules", buttons, tag("div", modules, class_="tree"))
    if comparison is not None:
        yield section("comparison", "Against float32", *_comparison(comparison, tree.ids()))
    rows = table(_operation_columns(tree.ids()), audit.operations)
    yield section("operations", f"Operations ({len(audit.operations)})", rows)


def _summary(audit: AuditFigures) -> Markup:
    flops = f"{amount(sum(audit.flops_by_dtype.values()))} FLOPs"
    parts = [_counted(len(audit.findings), "finding"), flops]
    if audit.eight_bit_matmul_share:
        parts.append(f"{audit.eight_bit_matmul_share:.0%} of matmul FLOPs in 8 bits")
    multiplies = any(map(is_matmul_operation, audit.operations))
    share = f"{audit.f32_matmul_share:.0%} of matmul FLOPs in float32 or wider"
    parts.append(share if multiplies else "no matmul")
    return tag("p", " · ".join(parts), class_="summary")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --------------------------------------------------------------------------------------------------
# Findings and shares
# --------------------------------------------------------------------------------------------------


def _findings(findings: Sequence[Finding], ids: Mapping[str, str]) -> list[Markup]:
    """Renders findings by kind, the gravest first, as the audit has them.

    Findings that differ in their place only, as in repeated layers, are one item.
    """
    kinds: dict[str, dict[Finding, list[Finding]]] = {}
    for finding in findings:
        said = kinds.setdefault(finding.kind, {})
        said.setdefault(dataclasses.replace(finding, path="", count=0), []).append(finding)
    shown = []
    for kind, said in kinds.items():
        title = tag("summary", tag("strong", kind), f" ({sum(map(len, said.values()))})")
        meaning = tag("p", FINDING_KINDS[kind], class_="meaning") if kind in FINDING_KINDS else ""
        items = tag("ul", *(_finding(alike, ids) for alike in said.values()))
        shown.append(tag("details", title, meaning, items, class_="kind", open=True))
    return shown


def _finding(alike: Sequence[Finding], ids: Mapping[str, str]) -> Markup:
    finding, places = alike[0], []
    direction = tag("span", "backward", class_="mark") if finding.is_backward else ""
    what = join_markup((tag("code", finding.primitive), " ", *map(chip, finding.dtypes), direction))
    for one in alike:
        times = f" {one.count:,} times" if one.count != 1 else ""
        places.append(tag("li", link(one.path, ids), times))
    others = tag("ul", *places[_PLACES:], class_="places")
    more = tag("details", tag("summary", f"{len(places) - _PLACES} more"), others)
    return tag(
        "li",
        tag("div", what, " ", tag("span", finding.source, class_="source")),
        tag("div", finding.message),
        tag("ul", *places[:_PLACES], class_="places"),
        more if len(places) > _PLACES else "",
        class_="finding",
    )


# --------------------------------------------------------------------------------------------------
# The tree
# --------------------------------------------------------------------------------------------------


def _node(node: ModuleNode, total: int, *, depth: int) -> Markup:
    """Renders a module with those below it, as `details` that fold without scripts too."""
    summary = tag("summary", *_of_node(node, total), class_=colour(next(iter(node.dtypes), "")))
    children = [_node(child, total, depth=depth + 1) for child in node.children.values()]
    rows = f"{_counted(len(node.operations), 'row')} {'here' if node.path else OUTSIDE}"
    shown = tag("button", f"Show {rows}", type="button", data_search=node.path or OUTSIDE)
    own = tag("p", shown, class_="own") if node.operations else ""
    is_open = depth < 2 or (depth == 2 and node.findings > 0)
    options = {"id": node.id, "open": is_open, "data_path": node.path, "class_": "node"}
    return tag("details", summary, own, *children, **options)


def _of_node(node: ModuleNode, total: int) -> Iterable[Markup]:
    yield tag("span", node.name or "all", class_="name")
    yield join_markup(map(chip, node.dtypes))
    if node.flops:
        yield tag("span", f"{node.flops / total:.1%} of FLOPs", class_="amount")
        parts = pieces(node.figures.flops_by_dtype, total)
        yield tag("span", *parts, class_="bar small", aria_hidden="true")
    if node.matmul_shares:
        yield tag("span", f"matmuls: {node.matmul_shares}", class_="amount")
    if node.findings:
        yield tag("span", _counted(node.findings, "finding"), class_="mark")


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def _operation_columns(ids: Mapping[str, str]) -> Columns:
    return {
        "path": lambda op: (link(op.path, ids), None),
        "kind": lambda op: (op.kind, None),
        "primitive": lambda op: (tag("code", operation_name(op)), None),
        "operands": lambda op: (join_markup(map(chip, op.operands)), None),
        "accumulation": lambda op: (chip(op.accumulation), None),
        "result": lambda op: (chip(op.result), None),
        "pass": lambda op: ("backward" if op.is_backward else "forward", None),
        "runs": lambda op: (f"{op.count:,}", op.count),
        "FLOPs": lambda op: (amount(op.flops), op.flops),
        "bytes": lambda op: (bytes_text(op.bytes), op.bytes),
        "source": lambda op: (tag("span", op.source, class_="source"), None),
    }


def _comparison(comparison: Comparison, ids: Mapping[str, str]) -> Iterable[Markup]:
    policy = f", under {comparison.policy}" if comparison.policy else ""
    worst = f"Worst error of the outputs{policy}: {figure(comparison.error, '.3g')}. "
    jump, step = comparison.first_jump, comparison.jump_step
    told: Sequence[object] = ("The error jumps nowhere.",)
    if jump is not None:
        told = ("The error jumps first at ", link(jump, ids), ".")
    yield tag("p", worst, *told, "" if step is None else f" In step {step} of a scan.")
    if comparison.notes:
        yield tag("ul", *(tag("li", note) for note in comparison.notes))
    yield tag("div", Markup(comparison.to_svg()), class_="drawing")
    yield table(_row_columns(ids), comparison.rows)
    if comparison.codes:
        yield tag("h3", "Operands in 8 bits")
        yield table(_code_columns(ids), comparison.codes)


def _row_columns(ids: Mapping[str, str]) -> Columns:
    def where(row: Row) -> Markup:
        mark = tag("span", "jump", class_="mark") if row.is_jump else ""
        # others are named, as the function's result is not
        is_module = row.kind in ("activation", "gradient")
        path = link(row.path, ids) if is_module else tag("code", row.path or "the result")
        return join_markup((path, " ", mark))

    return {
        "path": lambda row: (where(row), None),
        "values": lambda row: (row.kind, None),
        "dtype": lambda row: (chip(row.dtype), None),
        "error": lambda row: (figure(row.error, ".2e"), row.error),
        "cosine": lambda row: (figure(row.cosine, ".6f"), row.cosine),
        "underflow": lambda row: _share(row.underflow),
        "subnormal": lambda row: _share(row.subnormal),
        "overflow": lambda row: _share(row.overflow),
        "of limit": lambda row: _share(row.headroom),
    }


def _code_columns(ids: Mapping[str, str]) -> Columns:
    return {
        "path": lambda codes: (link(codes.path, ids), None),
        "operand": lambda codes: (codes.operand, None),
        "dtype": lambda codes: (chip(codes.dtype), None),
        "saturated": lambda codes: _share(codes.saturated),
        "underflow": lambda codes: _share(codes.underflow),
    }


def _share(number: float) -> Cell:
    return figure(number, ".2%"), number

"""Casts that undo each other, round twice or are repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from policy.inspect.audit.finding_kinds import REPEATED, ROUND_TRIP, finding, shape_of
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.values import (
    bits,
    is_cast,
    is_cotangent,
    is_returned,
    made_of,
    narrows,
    users,
)
from policy.programs.dtypes import HALVES
from policy.programs.primitives import ANNOTATES, REARRANGES
from policy.programs.reading.graph import BranchesTaken, Node, Value
from policy.programs.reading.source_lines import (
    author_of,
    authors_of,
    is_by_layers,
    is_ours,
    is_written,
)


def round_trips(flow: Flow) -> Iterator[Finding]:
    """Yields casts that are read by casts only, back or to the other half dtype.

    All of them are in one module and one function: a value that one module narrows and the next one
    widens is stored in half precision in between, as intended.
    """
    found = list(_round_trips(flow))
    nodes = flow.graph.nodes if found else ()
    # The files and names of functions that contain more than casts.
    working = {author_of(node.site.equation) for node in nodes if not is_cast(node)}
    for node, on, message in found:
        home = node.site.path, _function_of(node, working)
        places = {(cast.site.path, _function_of(cast, working)) for cast in on}
        if places == {home} and not any(cast.site.is_placed for cast in on):
            dtypes = (node.inputs[0].dtype, node.out.dtype, on[0].out.dtype)
            yield finding(ROUND_TRIP, node, message, dtypes)


def _round_trips(flow: Flow) -> Iterator[tuple[Node, list[Node], str]]:
    """Yields casts that are read by casts only, these, and the message about them."""
    for node in flow.graph.nodes:
        if not is_cast(node) or is_cotangent(node) or node.site.is_placed or is_returned(node.out):
            continue
        on = list(users(node.out))
        if on and all(map(is_cast, on)) and (message := _back(node, on) or _twice(node, on)):
            yield node, on, message


def _function_of(cast: Node, working: Collection[tuple[str, str]]) -> tuple[str, str]:
    """Returns the user's function that a cast is written in, skipping helpers that only cast."""
    authors = list(authors_of(cast.site.equation))
    return next((author for author in authors if author in working), next(iter(authors), ("", "")))


def _back(node: Node, back: list[Node]) -> str:
    """Returns the message about a cast that the next ones undo; "" if they do not.

    JAX's own sums cast to float32 and back: two in a row are not written as casts.
    """
    first, middle = node.inputs[0].dtype, node.out.dtype
    if first == middle or any(cast.out.dtype != first for cast in back):
        return ""
    if is_ours(node.site.equation) or not any(is_written(n.site.equation) for n in (node, *back)):
        return ""
    loses = bits(middle) <= bits(first)
    cost = f"all but {middle}'s digits are lost" if loses else "that changes nothing"
    return (
        f"{shape_of(node.inputs[0])} is cast to {middle} and straight back: {cost}. Leave both "
        "casts out."
    )


def _twice(node: Node, on: list[Node]) -> str:
    """Returns the message about a cast between the two half dtypes; "" for others."""
    middle, last = node.out.dtype, on[0].out.dtype
    if not narrows(node) or any({middle, cast.out.dtype} != HALVES for cast in on):
        return ""
    return (
        f"{shape_of(node.inputs[0])} is cast to {middle} and from there to {last}: it is rounded "
        f"twice, and loses values that either dtype can't hold. Cast it to {last} directly."
    )


def repeated_casts(flow: Flow) -> Iterator[Finding]:
    """Yields arguments and constants that user code narrows to the same dtype more than once.

    Layers narrow a weight at each use on purpose, as autocast does: XLA merges the casts, and the
    gradients of the uses are summed in float32.
    """
    casts: dict[tuple[int, str], list[Node]] = defaultdict(list)
    for node in flow.graph.nodes:
        if not narrows(node) or node.site.is_backward or node.site.is_placed:
            continue
        array = _stored(node.inputs[0])
        if array is not None and not is_by_layers(node.site.equation):
            casts[id(array), node.out.dtype].append(node)
    for nodes in casts.values():
        again = next((n for n in nodes[1:] if _may_both_run(nodes[0].branch, n.branch)), None)
        if again is not None:
            message = (
                f"{shape_of(again.inputs[0])} is cast to {again.out.dtype} {len(nodes)} times. "
                "Cast it once, if its gradient may be summed in half precision, or leave the casts "
                "to the layers."
            )
            yield finding(REPEATED, again, message)


def _stored(value: Value) -> Value | None:
    """Returns the argument, constant or scanned row that a value is a rearrangement of, or None."""
    value = made_of(value, lambda node: node.name in REARRANGES | ANNOTATES)
    is_row = value.maker is not None and value.maker.name == "row"
    return value if value.shape and (value.maker is None or is_row) else None


def _may_both_run(one: BranchesTaken, other: BranchesTaken) -> bool:
    """Returns whether two nodes may run in one call.

    Nodes in different branches of one conditional do not.
    """
    chosen = dict(one)
    return all(chosen.get(conditional, branch) == branch for conditional, branch in other)

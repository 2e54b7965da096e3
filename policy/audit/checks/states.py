"""State that goes into a call and comes out of it in half precision: a loop whose turns are calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from policy._jaxpr.graph import Node, Value
from policy._jaxpr.primitives import DRAWS
from policy._jaxpr.walk import written_at
from policy.audit.accumulations import Dependence, Share, Shares
from policy.audit.checks.carries import gates_of
from policy.audit.finding_kinds import CARRY, finding, shape_of
from policy.audit.flow import Flow, is_cotangent, is_matmul, is_narrow
from policy.audit.report import Finding
from policy.audit.states import State

_MOST = 0.5  # a known share below that is no average that anybody keeps


def narrowed_states(flow: Flow) -> Iterator[Finding]:
    """Params, averages and statistics in half precision that a call adds to, and returns for the
    next call.

    What a residual block adds depends on what it adds to, and is no state; what a gradient adds is.
    Params whose master weights, or whose rounding errors, are kept beside them are not added to in
    half.
    """
    states: dict[int, list[State]] = defaultdict(list)
    for state in flow.states:
        before, after = _values(flow, state)
        if before is not after:
            states[state.output].append(state)
    gates = _gates(flow, [state for each in states.values() for state in each])
    found: dict[tuple[str, ...], list[tuple[State, Node]]] = defaultdict(list)
    for each in states.values():
        sums = ((state, _sum(*_values(flow, state), gates)) for state in each)
        state, node = next(
            ((state, node) for state, node in sums if node is not None), (None, None)
        )
        if state is not None and node is not None:
            dtype = flow.graph.arguments[state.argument].dtype
            found[*node.site.path, written_at(node.site.equation), node.name, dtype].append(
                (state, node)
            )
    for alike in found.values():
        yield finding(CARRY, alike[0][1], _message(flow, [state for state, _ in alike]))


def _values(flow: Flow, state: State) -> tuple[Value, Value]:
    return flow.graph.arguments[state.argument], flow.graph.outputs[state.output]


def _gates(flow: Flow, states: list[State]) -> set[int]:
    """The arrays of the state that gate what depends on them; hyperparameters among it are scalars."""
    return gates_of(
        (before, after) for before, after in (_values(flow, s) for s in states) if before.shape
    )


def _sum(before: Value, after: Value, gates: set[int]) -> Node | None:
    """Returns the addition that makes a half state's next value of it; None where none does."""
    if not is_narrow(before.dtype):
        return None
    is_counter = not before.shape  # one that counts calls adds a number that stands in the program
    is_multiplied = Dependence((id(before),), is_cotangent)
    added: list[Value] = []

    def counts(terms: list[Value]) -> bool:
        added.extend(terms)
        return is_counter or any(_is_new(term, before) for term in terms)

    shares = Shares(before, gates, statistics=True, counts=counts)
    share = shares.of(after)
    if share is None or not _is_kept(share) or shares.is_compensated():
        return None
    if any(
        is_matmul(node) and any(map(is_multiplied, node.inputs))
        for term in added
        for node in _makers(term)
    ):
        return None
    return next((node for node in shares.sums if not is_cotangent(node)), None)


def _makers(value: Value) -> Iterator[Node]:
    """The nodes that a value is made by, of the forward pass."""
    waiting, seen = [value], {id(value)}
    while waiting:
        maker = waiting.pop().maker
        if maker is None or is_cotangent(maker):
            continue
        yield maker
        fresh = [v for v in maker.inputs if id(v) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)


def _is_kept(share: Share) -> bool:
    return share.added and share.factor >= (_MOST if share.is_exact else 0) and share.factor > 0


def _is_new(value: Value, state: Value) -> bool:
    """Returns whether a term depends on anything that the call is given beside the state itself.

    Numbers in the program don't, nor does noise: an image is shifted and perturbed, a state is
    added to.
    """
    waiting, seen = [value], {id(value)}
    while waiting:
        value = waiting.pop()
        if value is state or value.array is not None:
            continue
        if value.maker is None:
            return True
        fresh = (
            [v for v in value.maker.inputs if id(v) not in seen]
            if value.maker.name not in DRAWS
            else []
        )
        seen.update(map(id, fresh))
        waiting.extend(fresh)
    return False


def _message(flow: Flow, states: list[State]) -> str:
    """Returns the message about the arrays that one line adds to."""
    before, _ = _values(flow, states[0])
    others = f" and {len(states) - 1} more" if states[1:] else ""
    return (
        f"{states[0].name}, {shape_of(before)}{others}: the call returns it with something added "
        "to it, for the next "
        "call. What is below its last digit is lost each time. Keep it in float32; "
        "policy.mixed_precision keeps what "
        "rounding parameters loses."
    )

"""Half-precision state that a call returns for the next one: a loop over calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from policy.inspect.audit.accumulations import share_of
from policy.inspect.audit.checks.carries import gates_of
from policy.inspect.audit.finding_kinds import CARRY, finding, shape_of
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.states import State
from policy.inspect.audit.values import behind, followed, is_cotangent, is_matmul, is_narrow
from policy.programs.primitives import DRAWS
from policy.programs.reading.graph import Node, Value
from policy.programs.reading.walk import written_at

_MOST = 0.5  # the smallest share, if known, that counts as a running average


def narrowed_states(flow: Flow) -> Iterator[Finding]:
    """Yields half-precision params, averages and statistics that each call adds to.

    A residual stream is not state, because the terms added to it depend on it. Gradients with
    respect to a state may be added to it. Params are exempt if master weights, or their rounding
    errors, are kept beside them.
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
    """Returns the ids of state arrays that may be gates; scalars are hyperparameters."""
    return gates_of(
        (before, after) for before, after in (_values(flow, s) for s in states) if before.shape
    )


def _sum(before: Value, after: Value, gates: set[int]) -> Node | None:
    """Returns the addition that makes the next value of a half-precision state, or None."""
    if not is_narrow(before.dtype):
        return None
    share = share_of(before, after, gates, statistics=True)
    if share is None or share.factor <= 0 or (share.is_exact and share.factor < _MOST):
        return None
    is_counter = not before.shape  # a counter of calls adds a literal
    if not share.terms or not (is_counter or any(_is_new(term, before) for term in share.terms)):
        return None
    made = (one.maker for one in followed(share.terms, _operands))
    matmuls = (node for node in made if node is not None and is_matmul(node))
    multiplied = [operand for node in matmuls for operand in _operands(node.out)]
    if any(one is before for one in followed(multiplied, _operands)):
        return None
    return next((node for node in share.sums if not is_cotangent(node)), None)


def _operands(value: Value) -> list[Value]:
    """Returns the operands that the forward pass computes a value of."""
    maker = value.maker
    return [] if maker is None or is_cotangent(maker) else maker.inputs


def _is_new(value: Value, state: Value) -> bool:
    """Returns whether a term depends on an input of the call other than the state itself.

    Constants and random noise do not count: images are shifted and perturbed, too.
    """

    def others(node: Node) -> list[Value]:
        return [] if node.name in DRAWS else [v for v in node.inputs if v is not state]

    return value is not state and any(
        one.maker is None and one.array is None for one in behind(value, others)
    )


def _message(flow: Flow, states: list[State]) -> str:
    """Returns the message about the arrays that one line adds to."""
    before, _ = _values(flow, states[0])
    others = f" and {len(states) - 1} more" if states[1:] else ""
    return (
        f"{states[0].name}, {shape_of(before)}{others}: each call adds to it and returns it for "
        "the next call. Terms below its last digit are lost each time. Keep it in float32; for "
        "parameters, policy.mixed_precision stores what rounding would lose."
    )

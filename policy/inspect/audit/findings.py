"""Runs every check of an audit on a program and merges the findings, the gravest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from policy.core.precedence import Asked
from policy.inspect.audit.checks.carries import narrowed_carries
from policy.inspect.audit.checks.casts import repeated_casts, round_trips
from policy.inspect.audit.checks.chains import sums_by_hand
from policy.inspect.audit.checks.constants import constants_out_of_range
from policy.inspect.audit.checks.discrete import coarse_draws, rounded_choices
from policy.inspect.audit.checks.eight_bits import (
    dequantised_matmuls,
    narrow_accumulators,
    unscaled_casts,
)
from policy.inspect.audit.checks.functions import low_precision_functions
from policy.inspect.audit.checks.integers import rounded_integers
from policy.inspect.audit.checks.promotions import (
    default_precisions,
    float32_matmuls,
    mixed_matmuls,
    silent_promotions,
)
from policy.inspect.audit.checks.residuals import float32_residuals
from policy.inspect.audit.checks.states import narrowed_states
from policy.inspect.audit.checks.sums import low_precision_reductions
from policy.inspect.audit.finding_kinds import FINDING_KINDS as FINDING_KINDS
from policy.inspect.audit.flow import Flow
from policy.inspect.audit.lost_constants import Lost
from policy.inspect.audit.operations import Finding
from policy.inspect.audit.states import State
from policy.programs.reading.graph import Graph

_CHECKS: tuple[Callable[[Flow], Iterator[Finding]], ...] = (
    low_precision_reductions,
    sums_by_hand,
    low_precision_functions,
    constants_out_of_range,
    rounded_integers,
    rounded_choices,
    coarse_draws,
    unscaled_casts,
    narrow_accumulators,
    narrowed_carries,
    narrowed_states,
    mixed_matmuls,
    dequantised_matmuls,
    silent_promotions,
    float32_matmuls,
    default_precisions,
    round_trips,
    repeated_casts,
    float32_residuals,
)


def findings_of(
    graph: Graph, lost: Lost | None = None, states: Sequence[State] = (), asked: Asked | None = None
) -> tuple[Finding, ...]:
    """Returns the findings of every check, sorted by gravity, then in program order.

    Args:
      lost: the constants noted by `noticing` while the program was traced.
      states: arguments and outputs of the call that may be one state.
      asked: the dtypes requested while the program was traced, which are exempt from findings.
    """
    flow = Flow(graph, lost, states, asked)
    found = _merged(finding for check in _CHECKS for finding in check(flow))
    gravity = {kind: i for i, kind in enumerate(FINDING_KINDS)}
    return tuple(sorted(found, key=lambda finding: gravity[finding.kind]))


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merges findings that differ in their count only, adding up the counts."""
    counts: dict[Finding, int] = {}
    for finding in findings:
        key = dataclasses.replace(finding, count=0)
        counts[key] = counts.get(key, 0) + finding.count
    return [dataclasses.replace(finding, count=count) for finding, count in counts.items()]

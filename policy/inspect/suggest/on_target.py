"""Suggestions whose cost is what a target's compiler says: the front of error against cost."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import DtypePolicyWarning
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.estimate.costing import CompiledRow, compiled_row
from policy.inspect.estimate.placement import placement_of
from policy.inspect.estimate.steps import Candidate, MadeCall, Step, traced_step
from policy.inspect.estimate.targets import Target
from policy.inspect.suggest.applied import (
    applied,
    confirmed,
    first_that_runs,
    rules_for,
    suggestion_of,
)
from policy.inspect.suggest.front import FrontPoint
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import short_text
from policy.programs.paths import spelled

RowCompiler = Callable[[WideModules], tuple[PolicyRules, CompiledRow]]


def require_timed(target: Target) -> None:
    """Checks that the time of a target's programs is known.

    Raises:
      ValueError: neither its compiler's cycles nor published peaks are.
      RuntimeError: its compiler is not installed.
    """
    if not target.chip.bandwidth or not target.chip.peaks:
        raise ValueError(
            "suggest ranks modules by a compiler's cycles or by published peaks, and "
            f"on={target.name!r} has neither: give a TPU or GPU, such as 'v5e:1x1' or 'h100'. "
            "Without on=, cost is a count of FLOPs and bytes."
        )
    _ = target.devices


def row_compiler(
    trial: Trial,
    target: Target,
    call: MadeCall,
    policy: Policy,
    backward: bool,
    params: ParamsArgument,
    mesh: Mapping[str, int] | None,
    shardings: Any,
) -> RowCompiler:
    """Returns a function that compiles a call for a target, for candidates in float32.

    It returns the first rules under which the call can be traced, and the costs of the program. The
    arguments are those of `suggest` and of `policy.estimate`.
    """
    placement = placement_of(target, mesh, shardings, (call.args, call.kwargs))
    row, route = Candidate(short_text(policy), policy, {}), trial.program.route

    def step(rules: PolicyRules) -> Step:
        return traced_step(call, row, rules if rules else None, None, backward, params, route)

    def compiled(wide: WideModules) -> tuple[PolicyRules, CompiledRow]:
        with placement.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DtypePolicyWarning)  # suggest's own trace told them
            rules, traced = first_that_runs(rules_for(trial, wide), step)
        return rules, compiled_row(row, call, traced, placement, shardings)

    return compiled


def suggestion_on(
    trial: Trial, target: Target, compiled: RowCompiler, count: int, budget: float
) -> Suggestion:
    """Returns the front of error against cost, with the point on it that a budget chooses.

    Args:
      trial: the compiled program of `suggest`.
      target: the devices.
      compiled: compiles the call for the target.
      count: the most points.
      budget: the error allowed; infinite for any.

    Raises:
      TypeError, ValueError: as `policy.estimate` does.
      ValueError: no rules meet the budget, or none of those fits into the target's memory.
    """
    search = trial.search(trial.costs)
    search.survey()
    measured: dict[WideModules, float] = {}
    if math.isfinite(budget):
        wide, _, error = confirmed(trial, search, budget)
        measured[wide] = error
    sets = front_sets(search.order(), count, measured)
    search.runs = max(search.runs, len(sets))
    points = {
        wide: _point(trial, search, wide, *compiled(wide), measured.get(wide)) for wide in sets
    }
    chosen: WideModules | None = None
    for wide in sorted(points, key=lambda wide: points[wide].seconds):
        point = points[wide]
        if chosen is not None or math.isinf(point.seconds) or point.error > budget:
            continue
        if point.is_emulated:
            error = applied(trial, wide, [point.rules])[1]
            points[wide] = dataclasses.replace(point, error=error, is_emulated=False)
        chosen = wide if points[wide].error <= budget else None
    if chosen is None and math.isfinite(budget):
        lacking = [point.missing for point in points.values() if point.error <= budget]
        missing = min(filter(None, lacking), default=0)
        raise ValueError(
            f"No rules within an error of {budget:.3g} fit into the memory of {target.name}: at "
            f"least {missing / 2**30:.2f} GiB are missing. Spread the step with shardings=; "
            "policy.estimate shows what uses the memory."
        )
    point = None if chosen is None else points[chosen]
    rules, error = (PolicyRules([]), math.nan) if point is None else (point.rules, point.error)
    return dataclasses.replace(
        suggestion_of(trial, search, chosen or frozenset(), rules, budget, error),
        target=target.name,
        timing=target.timing,
        points=tuple(sorted(points.values(), key=lambda point: point.seconds)),
        chosen=point,
    )


def _point(
    trial: Trial,
    search: Search,
    wide: WideModules,
    rules: PolicyRules,
    row: CompiledRow,
    measured: float | None,
) -> FrontPoint:
    paths = tuple(spelled(trial.paths[i]) for i in sorted(wide))
    error = (search.error(wide) or 0.0) if measured is None else measured
    return FrontPoint(rules, paths, error, row.cost, is_emulated=measured is None)


def front_sets(
    order: Sequence[int], count: int, asked: Iterable[WideModules] = ()
) -> list[WideModules]:
    """Returns at most `count` sets of candidates: none, all, those asked for, and others between.

    Args:
      order: the candidates, by the error that each removes per cost.
      count: at least 2.
      asked: sets to choose after these two.
    """
    sizes = [round(len(order) * step / (count - 1)) for step in range(1, count - 1)]
    ends = frozenset[int](), frozenset(order)
    between = (frozenset(order[:size]) for size in sizes)
    return list(dict.fromkeys([*ends, *asked, *between]))[:count]

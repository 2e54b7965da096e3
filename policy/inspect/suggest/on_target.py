"""Suggestions whose cost is what a target's compiler says: the front of error against cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import DtypePolicyWarning
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.estimate.costing import CompiledRow, compiled_row
from policy.inspect.estimate.placement import Placement, placement_of
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

RuledRow = tuple[PolicyRules, CompiledRow]


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


@dataclasses.dataclass
class FrontSearch:
    """Searches for the front of error against cost, and for the point on it that a budget chooses.

    Each set of rules is compiled once for the target.

    Attributes:
      trial: the compiled program of `suggest`.
      target: the devices.
      call: the function and its arguments.
      policy: the policy beside the rules.
      backward, params: as for `suggest`.
      mesh, shardings: as for `policy.estimate`.
      count: the most points.
      budget: the error allowed; infinite for any.
      rows: the rules and costs of the programs for the target, by the candidates in float32.
      measured: errors with the rules applied, by the candidates in float32.
      confirmations: the number of programs in which rules were applied to measure their error.
    """

    trial: Trial
    target: Target
    call: MadeCall
    policy: Policy
    backward: bool
    params: ParamsArgument
    mesh: Mapping[str, int] | None
    shardings: Any
    count: int
    budget: float
    rows: dict[WideModules, RuledRow] = dataclasses.field(default_factory=dict)
    measured: dict[WideModules, float] = dataclasses.field(default_factory=dict)
    confirmations: int = 0

    def suggestion(self) -> Suggestion:
        """Returns the suggestion.

        Raises:
          TypeError, ValueError: as `policy.estimate` does.
          ValueError: no rules meet the budget, or none of those fits into the target's memory.
        """
        trial = self.trial
        search = trial.search(trial.costs)
        search.survey()
        asked = []
        if math.isfinite(self.budget):
            wide, _, error, self.confirmations = confirmed(trial, search, self.budget)
            self.measured[wide] = error
            asked = [wide]
        sets = front_sets(search.order(), self.count, asked)
        search.runs = max(search.runs, len(sets))
        chosen = self._chosen(search, sets)
        points = {wide: self._point(search, wide) for wide in sets}
        if chosen is None and asked:
            within = [point for point in points.values() if point.error <= self.budget]
            missing = min((point.missing for point in within if not point.fits), default=0)
            raise ValueError(
                f"No rules within an error of {self.budget:.3g} fit into the memory of "
                f"{self.target.name}: at least {missing / 2**30:.2f} GiB are missing. Spread the "
                "step with shardings=; policy.estimate shows what uses the memory."
            )
        wide = frozenset() if chosen is None else chosen
        rules = PolicyRules([]) if chosen is None else self._row(wide)[0]
        error = self.measured.get(wide, math.nan)
        return dataclasses.replace(
            suggestion_of(trial, search, wide, rules, self.budget, error, self.confirmations),
            target=self.target.name,
            timing=self.target.timing,
            points=tuple(sorted(points.values(), key=_cost)),
            chosen=None if chosen is None else points[chosen],
            programs=len(self.rows),
        )

    @functools.cached_property
    def _placement(self) -> Placement:
        arguments = (self.call.args, self.call.kwargs)
        return placement_of(self.target, self.mesh, self.shardings, arguments)

    def _row(self, wide: WideModules) -> RuledRow:
        """Compiles the call under the first rules of a set under which it can be traced."""
        if wide in self.rows:
            return self.rows[wide]
        row, route = Candidate(short_text(self.policy), self.policy, {}), self.trial.program.route

        def step(rules: PolicyRules) -> Step:
            named = rules if rules else None
            return traced_step(self.call, row, named, None, self.backward, self.params, route)

        with self._placement.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DtypePolicyWarning)  # suggest's own trace told them
            rules, traced = first_that_runs(rules_for(self.trial, wide), step)
        found = compiled_row(row, self.call, traced, self._placement, self.shardings)
        self.rows[wide] = rules, found
        return self.rows[wide]

    def _chosen(self, search: Search, sets: Sequence[WideModules]) -> WideModules | None:
        """Returns the cheapest set that fits and meets the budget in a measured run."""
        for wide in sorted(sets, key=lambda wide: _cost(self._point(search, wide))):
            point = self._point(search, wide)
            if not point.fits or point.error > self.budget:
                continue
            if wide not in self.measured:
                self.confirmations += 1
                self.measured[wide] = applied(self.trial, wide, [point.rules])[1]
            if self.measured[wide] <= self.budget:
                return wide
        return None

    def _point(self, search: Search, wide: WideModules) -> FrontPoint:
        rules, row = self._row(wide)
        cost = row.cost
        return FrontPoint(
            rules,
            tuple(spelled(self.trial.paths[i]) for i in sorted(wide)),
            self.measured.get(wide, search.error(wide) or 0.0),
            None if cost.is_exhausted else cost.cycles,
            None if cost.is_exhausted else cost.seconds,
            cost.exchange_seconds,
            0 if cost.fits is not False else max(-(cost.spare or 0), 1),
            wide not in self.measured,
            cost.is_lower_bound,
        )


def _cost(point: FrontPoint) -> float:
    return math.inf if point.seconds is None else point.seconds


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

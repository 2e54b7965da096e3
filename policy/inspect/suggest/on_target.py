"""Suggestions whose cost is what a target's compiler says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from policy.core.rules import PolicyRules
from policy.inspect.suggest.applied import applied, rules_for
from policy.inspect.suggest.confirmed import confirmed, search_of, suggestion_of
from policy.inspect.suggest.front import FrontPoint, chosen_sets, measured_sets
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.suggest.target_costs import TargetCompiler, TargetProgram, module_costs
from policy.inspect.suggest.trial import Trial
from policy.programs.paths import spelled


@dataclasses.dataclass
class FrontSearch:
    """Searches for the front of error against cost, and for the point on it that a budget chooses.

    Attributes:
      trial: the compiled program of `suggest`.
      compiler: compiles for the target.
      count: the most points.
      budget: the error allowed; infinite for any.
      programs: those compiled for the target, by the candidates in float32.
      measured: errors with the rules applied, by the candidates in float32.
      confirmations: the number of programs in which rules were applied to measure their error.
    """

    trial: Trial
    compiler: TargetCompiler
    count: int
    budget: float
    programs: dict[WideModules, TargetProgram] = dataclasses.field(default_factory=dict)
    measured: dict[WideModules, float] = dataclasses.field(default_factory=dict)
    confirmations: int = 0

    def suggestion(self) -> Suggestion:
        """Returns the suggestion.

        Raises:
          ValueError: no rules meet the budget, or none of those fits into the target's memory.
        """
        search = self._search()
        asked = [self._confirmed(search)] if math.isfinite(self.budget) else []
        sets = chosen_sets(measured_sets(search), search.costs, self.count, asked)
        for wide in sets:
            self._compile(wide)
        chosen = self._chosen(search, sets)
        points = {wide: self._point(search, wide) for wide in sets}
        if chosen is None and asked:
            raise ValueError(self._no_memory([points[wide] for wide in sets]))
        wide = frozenset() if chosen is None else chosen
        found = suggestion_of(
            self.trial,
            search,
            wide,
            PolicyRules([]) if chosen is None else self.programs[wide].rules,
            self.budget,
            self.measured.get(wide, math.nan),
            self.confirmations,
        )
        return dataclasses.replace(
            found,
            target=self.compiler.target.name,
            timing=self.compiler.target.timing,
            points=tuple(sorted(points.values(), key=_cost)),
            chosen=None if chosen is None else points[chosen],
            programs=self.compiler.programs,
        )

    def _search(self) -> Search:
        """Returns a search whose costs are those of the two ends: no module and all in float32."""
        trial, none, every = self.trial, frozenset[int](), frozenset(range(len(self.trial.paths)))
        for wide in (none, every):
            self._compile(wide)
        ends = self.programs[none], self.programs[every]
        costs = module_costs(*ends, trial.candidates, trial.costs)
        search = search_of(trial, costs)
        search.survey()
        return search

    def _compile(self, wide: WideModules) -> None:
        if wide not in self.programs:
            tried = rules_for(self.trial, wide)
            self.programs[wide] = self.compiler.compiled(tried, self.trial.program.route)

    def _confirmed(self, search: Search) -> WideModules:
        """Returns the set that costs least by the modules' costs, of those that meet the budget."""
        wide, found = confirmed(self.trial, search, self.budget)
        self.measured[wide] = found.error
        self.confirmations = found.compilations - 1
        return wide

    def _chosen(self, search: Search, sets: Sequence[WideModules]) -> WideModules | None:
        """Returns the cheapest set that fits and meets the budget in a measured run."""
        for wide in sorted(sets, key=lambda wide: _cost(self._point(search, wide))):
            point = self._point(search, wide)
            if not point.fits or point.error > self.budget:
                continue
            if wide not in self.measured:
                self.measured[wide] = self._measured(wide)
            if self.measured[wide] <= self.budget:
                return wide
        return None

    def _measured(self, wide: WideModules) -> float:
        self.confirmations += 1
        return applied(self.trial, wide, [self.programs[wide].rules])[1]

    def _point(self, search: Search, wide: WideModules) -> FrontPoint:
        program = self.programs[wide]
        cost = program.cost
        return FrontPoint(
            program.rules,
            tuple(spelled(self.trial.paths[i]) for i in sorted(wide)),
            self.measured.get(wide, search.known[wide]),
            None if cost.is_exhausted else cost.cycles,
            None if cost.is_exhausted else cost.seconds,
            cost.exchange_seconds,
            0 if cost.fits is not False else max(-(cost.spare or 0), 1),
            wide not in self.measured,
            cost.is_lower_bound,
        )

    def _no_memory(self, points: Sequence[FrontPoint]) -> str:
        met = [point.missing for point in points if point.error <= self.budget and not point.fits]
        return (
            f"No rules within an error of {self.budget:.3g} fit into the memory of "
            f"{self.compiler.target.name}: at least {min(met, default=0) / 2**30:.2f} GiB are "
            "missing. Spread the step with shardings=; policy.estimate shows what uses the memory."
        )


def _cost(point: FrontPoint) -> float:
    return math.inf if point.seconds is None else point.seconds

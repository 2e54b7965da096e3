"""Suggestions whose cost is what a target's compiler says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from policy.core.rules import PolicyRules
from policy.inspect.estimate.costing import CompiledRow
from policy.inspect.suggest.applied import applied, confirmed, rules_for
from policy.inspect.suggest.front import FrontPoint, chosen_sets, measured_sets
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Suggestion, suggestion_of
from policy.inspect.suggest.target_costs import TargetCompiler, module_costs
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
      rows: the rules and costs of the programs for the target, by the candidates in float32.
      measured: errors with the rules applied, by the candidates in float32.
      confirmations: the number of programs in which rules were applied to measure their error.
    """

    trial: Trial
    compiler: TargetCompiler
    count: int
    budget: float
    rows: dict[WideModules, tuple[PolicyRules, CompiledRow]] = dataclasses.field(
        default_factory=dict
    )
    measured: dict[WideModules, float] = dataclasses.field(default_factory=dict)
    confirmations: int = 0

    def suggestion(self) -> Suggestion:
        """Returns the suggestion.

        Raises:
          ValueError: no rules meet the budget, or none of those fits into the target's memory.
        """
        search, asked = self._search(), []
        if math.isfinite(self.budget):
            wide, _, error, self.confirmations = confirmed(self.trial, search, self.budget)
            self.measured[wide] = error
            asked = [wide]
        sets = chosen_sets(measured_sets(search), search.costs, self.count, asked)
        chosen = self._chosen(search, sets)
        points = {wide: self._point(search, wide) for wide in sets}
        if chosen is None and asked:
            raise ValueError(self._no_memory(points.values()))
        wide = frozenset() if chosen is None else chosen
        found = suggestion_of(
            self.trial,
            search,
            wide,
            PolicyRules([]) if chosen is None else self._row(wide)[0],
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
            programs=len(self.rows),
        )

    def _search(self) -> Search:
        """Returns a search whose costs are those of the two ends: no module and all in float32."""
        trial, every = self.trial, frozenset(range(len(self.trial.paths)))
        half, full = (self._row(wide)[1].by_path for wide in (frozenset[int](), every))
        search = trial.search(module_costs(half, full, trial.candidates, trial.costs))
        search.survey()
        return search

    def _row(self, wide: WideModules) -> tuple[PolicyRules, CompiledRow]:
        if wide not in self.rows:
            choices = rules_for(self.trial, wide)
            self.rows[wide] = self.compiler.compiled(choices, self.trial.program.route)
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
            self.measured.get(wide, search.known[wide]),
            None if cost.is_exhausted else cost.cycles,
            None if cost.is_exhausted else cost.seconds,
            cost.exchange_seconds,
            0 if cost.fits is not False else max(-(cost.spare or 0), 1),
            wide not in self.measured,
            cost.is_lower_bound,
        )

    def _no_memory(self, points: Iterable[FrontPoint]) -> str:
        met = [point.missing for point in points if point.error <= self.budget and not point.fits]
        return (
            f"No rules within an error of {self.budget:.3g} fit into the memory of "
            f"{self.compiler.target.name}: at least {min(met, default=0) / 2**30:.2f} GiB are "
            "missing. Spread the step with shardings=; policy.estimate shows what uses the memory."
        )


def _cost(point: FrontPoint) -> float:
    return math.inf if point.seconds is None else point.seconds

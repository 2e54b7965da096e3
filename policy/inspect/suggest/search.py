"""Searches for the cheapest set of paths in float32 that meets an error budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

WideModules = frozenset[int]
FEW = 8  # the largest number of candidates of which all sets are measured
# A set that meets the budget may have a predicted error this many times larger.
NEAR = 1.25
DEARER = 1.05  # a set may cost this factor more than the cheapest
_MOST_CONFIRMATIONS = 6
CANCELLATION = 2.0  # the error of several may be this many times smaller than that of one of them


def subsets(candidates: Collection[int]) -> Iterator[WideModules]:
    """Yields all sets of some candidates, the smallest first."""
    for count in range(len(candidates) + 1):
        yield from map(frozenset, itertools.combinations(sorted(candidates), count))


@dataclasses.dataclass
class Search:
    """Searches for a set of candidates, numbered 0 to n - 1, to run in float32.

    Attributes:
      measure: returns the error with these candidates in float32, and all others in half.
      measure_alone: returns the error with one candidate in half, and all others in float32.
      costs: the cost of each candidate in float32.
      runs: the number of measurements left.
      alone: the result of `measure_alone` for each; filled by `survey`.
      refused: the sets that missed the budget when their rules were applied.
    """

    measure: Callable[[WideModules], float]
    measure_alone: Callable[[int], float]
    costs: Sequence[float]
    runs: int
    alone: list[float] = dataclasses.field(default_factory=list)
    known: dict[WideModules, float] = dataclasses.field(default_factory=dict)
    refused: set[WideModules] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.every = frozenset(range(len(self.costs)))

    def error(self, wide: WideModules) -> float | None:
        """Returns the error of a set; None if it was not measured and no runs are left."""
        if wide not in self.known:
            if self.runs <= 0:
                return None
            self.runs -= 1
            self.known[wide] = self.measure(wide)
        return self.known[wide]

    def meets(self, wide: WideModules, budget: float) -> bool:
        """Returns whether the error of a set is within the budget, measuring it if needed."""
        error = self.error(wide)
        return error is not None and error <= budget and wide not in self.refused

    def survey(self) -> None:
        """Measures each candidate by itself."""
        self.alone = [self.measure_alone(i) for i in sorted(self.every)]
        self.runs -= len(self.alone)

    def order(self) -> list[int]:
        """Returns the candidates by the error they remove per unit of cost, best first.

        Independent errors add up in squares.
        """
        gain = lambda i: self.alone[i] ** 2 / max(self.costs[i], 1e-12)  # noqa: E731
        return sorted(
            self.every, key=lambda i: (not math.isinf(self.alone[i]), -gain(i), self.costs[i])
        )

    def least(self, budget: float) -> WideModules | None:
        """Returns a set that meets the budget, without superfluous candidates, or None.

        For few candidates it is the cheapest set. For many, removing any one of its candidates
        misses the budget.
        """
        if self.meets(frozenset(), budget):
            return frozenset()
        if not self.alone:
            self.survey()
        return self._cheapest(budget) if len(self.costs) <= FEW else self._pruned(budget)

    def _cheapest(self, budget: float) -> WideModules | None:
        """Returns the cheapest set that meets the budget.

        Sets are skipped if they lack a candidate whose error alone in half precision is too large
        for the others to make up for.
        """
        self.runs = max(self.runs, 2 ** len(self.costs))
        needed = {
            i for i in self.every if (self.error(self.every - {i}) or 0.0) > CANCELLATION * budget
        }
        sets = [chosen.union(needed) for chosen in subsets(self.every - needed)]
        sets.sort(key=lambda s: (self.cost(s), sorted(s)))
        return next((s for s in sets if self.meets(s, budget)), None)

    def _pruned(self, budget: float) -> WideModules | None:
        """Returns a set that meets the budget, without its superfluous candidates, or None.

        A prefix of `order`, found by bisection, loses candidates, the most expensive first. They
        have a budget of runs of their own: at most one for each.
        """
        order = self.order()
        low, high = 0, len(order)  # the first `low` are too few, the first `high` suffice
        while high - low > 1:
            middle = (low + high) // 2
            if self.meets(frozenset(order[:middle]), budget):
                high = middle
            else:
                low = middle
        wide = frozenset(order[:high])
        error = self.error(wide)  # None if no run was left: then its confirmation decides
        if error is not None and error > budget:
            return None
        self.runs = max(self.runs, len(wide))
        for i in sorted(wide, key=lambda i: (-self.costs[i], self.alone[i])):
            if self.meets(wide - {i}, budget):
                wide = wide - {i}
        return wide

    def cost(self, wide: Collection[int]) -> float:
        """Returns the cost of a set."""
        return sum(self.costs[i] for i in wide)

    def nearly(self, wide: WideModules | None, budget: float) -> list[WideModules]:
        """Returns at most two cheaper sets that were measured to miss the budget by little.

        The cheapest comes first. For many candidates there are none.
        """
        if not wide or len(self.costs) > FEW:
            return []
        near = (s for s, error in self.known.items() if budget < error <= NEAR * budget)
        cheaper = sorted(
            (s for s in near if self.cost(s) * DEARER < self.cost(wide)), key=self.cost
        )
        return cheaper[:2]

    def confirmed(
        self, budget: float, applied: Callable[[WideModules], float]
    ) -> tuple[WideModules, float, int]:
        """Returns a set that meets the budget when it is applied, its error, and the attempts.

        Sets that cost less and are predicted to miss the budget by little are tried first: some of
        them meet it. After a miss the next set is chosen, and after two misses for a budget reduced
        by the factor of the measurements' optimism. The last set tried has all candidates in
        float32; its error may be above the budget.

        Args:
          budget: the error allowed.
          applied: returns the error of a set whose rules are applied.
        """
        nearly = self.nearly(self.least(budget), budget)
        goal, optimism, attempt = budget, 1.0, 0
        while True:
            attempt += 1
            late = attempt - len(nearly)
            wide = self.least(goal) if 0 < late < _MOST_CONFIRMATIONS else None
            wide = nearly[attempt - 1] if late <= 0 else wide
            wide = self.every if wide is None or wide in self.refused else wide
            error = applied(wide)
            if error <= budget or wide == self.every:
                return wide, error, attempt
            self.refused.add(wide)
            if late > (2 if len(self.costs) <= FEW else 0):
                measured = self.known.get(wide, error)
                optimism = max(optimism, error / measured if measured else math.inf)
                goal = 0.999 * budget / optimism

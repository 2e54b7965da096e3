"""Searches for the smallest or cheapest set of paths in float32 that meets an error budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

WideModules = frozenset[int]
FEW = 8  # the largest number of candidates of which all sets are measured
_MOST_CONFIRMATIONS = 6
CANCELLATION = 2.0  # the error of several may be this many times smaller than that of one of them


def subsets(candidates: Collection[int]) -> Iterator[WideModules]:
    """Yields all sets of some candidates, the smallest first."""
    for count in range(len(candidates) + 1):
        yield from map(frozenset, itertools.combinations(sorted(candidates), count))


def minimal(holds: Callable[[frozenset[int]], bool], items: Sequence[int]) -> frozenset[int]:
    """Returns a set of items for which a condition holds, and for no smaller part of which it does.

    This is QuickXplain (Junker, AAAI 2004): k of n items take O(k log(n / k)) tests.

    Args:
      holds: a condition that holds for all items, and for every set that contains one for which it
        holds.
      items: the preferred ones come first.
    """

    def needed(given: frozenset[int], items: Sequence[int], may_hold: bool) -> frozenset[int]:
        """Returns a minimal set of items to add to the given ones."""
        if may_hold and holds(given):
            return frozenset()
        if len(items) == 1:
            return frozenset(items)
        first, last = items[: len(items) // 2], items[len(items) // 2 :]
        later = needed(given.union(first), last, True)
        return later | needed(given | later, first, bool(later))

    return needed(frozenset(), items, False)


@dataclasses.dataclass
class Search:
    """Searches for a set of candidates, numbered 0 to n - 1, to run in float32.

    Attributes:
      measure: returns the error with these candidates in float32, and all others in half.
      measure_alone: returns the error with one candidate in half, and all others in float32.
      costs: the cost of each candidate in float32.
      alone: the result of `measure_alone` for each; filled by `survey`.
      known: the result of `measure` for sets.
      rejected: the sets that missed the budget when their rules were applied.
      runs: the number of measurements left: for all sets of few candidates; of many, 3 n log2(n),
        less one for the reference.
    """

    measure: Callable[[WideModules], float]
    measure_alone: Callable[[int], float]
    costs: Sequence[float]
    alone: list[float] = dataclasses.field(default_factory=list)
    known: dict[WideModules, float] = dataclasses.field(default_factory=dict)
    rejected: set[WideModules] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        count = len(self.costs)
        self.every = frozenset(range(count))
        few, many = 2**count + count, int(3 * count * math.log2(max(count, 1))) - 1
        self.runs = few if count <= FEW else many

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
        return error is not None and error <= budget and wide not in self.rejected

    def survey(self) -> None:
        """Measures each candidate by itself."""
        self.alone = [self.measure_alone(i) for i in sorted(self.every)]
        self.runs -= len(self.alone)

    def order(self) -> list[int]:
        """Returns the candidates by the error they remove per unit of cost, best first.

        Independent errors add up in squares.
        """

        def key(i: int) -> tuple[bool, float, float]:
            gain = self.alone[i] ** 2 / max(self.costs[i], 1e-12)
            return not math.isinf(self.alone[i]), -gain, self.costs[i]

        return sorted(self.every, key=key)

    def least(self, budget: float) -> WideModules | None:
        """Returns a set that meets the budget, or None.

        For few candidates it is the cheapest set. Of many it has no superfluous candidate, and
        those that remove the most error by cost.
        """
        if self.meets(frozenset(), budget):
            return frozenset()
        if not self.alone:
            self.survey()
        if len(self.costs) <= FEW:
            return self._cheapest(budget)
        if not self.meets(self.every, budget):
            return None
        self.error(minimal(lambda wide: self.meets(wide, budget), self.order()))
        met = (wide for wide in self.known if self.meets(wide, budget))
        return min(met, key=lambda wide: (len(wide), self.cost(wide)), default=None)

    def _cheapest(self, budget: float) -> WideModules | None:
        """Returns the cheapest set that meets the budget.

        Sets are skipped if they lack a candidate whose error alone in half precision is too large
        for the others to make up for.
        """
        others = {i: self.error(self.every - {i}) or 0.0 for i in self.every}
        needed = {i for i, error in others.items() if error > CANCELLATION * budget}
        sets = sorted(filter(needed.issubset, subsets(self.every)), key=self.cost)
        return next((s for s in sets if self.meets(s, budget)), None)

    def cost(self, wide: Collection[int]) -> float:
        """Returns the cost of a set."""
        return sum(self.costs[i] for i in wide)

    def confirmed(
        self, budget: float, applied: Callable[[WideModules], float]
    ) -> tuple[WideModules, float]:
        """Returns a set that meets the budget when it is applied, and its error.

        After a miss the next set is chosen, for a budget reduced by the factor by which the
        measurements were too small, if its error is finite. The last set tried has all candidates
        in float32; its error may be above the budget.

        Args:
          budget: the error allowed.
          applied: returns the error of a set whose rules are applied.
        """
        goal = budget
        for attempt in itertools.count(1):
            wide = self.least(goal) if attempt <= _MOST_CONFIRMATIONS else None
            wide = self.every if wide is None else wide
            error = applied(wide)
            if error <= budget or wide == self.every:
                return wide, error
            self.rejected.add(wide)
            if attempt > (2 if len(self.costs) <= FEW else 0) and math.isfinite(error):
                measured = self.known.get(wide, error)
                goal = min(goal, 0.999 * budget * measured / error)
        raise AssertionError("the last set has all candidates")

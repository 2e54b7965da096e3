"""The search for the fewest modules, on errors that are computed from planted causes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from policy.inspect.suggest.search import Search

BUDGET = 1.0
Causes = list[tuple[int, ...]]  # each makes an error where all of its modules are in half precision


@dataclasses.dataclass
class Program:
    """A program whose causes make errors beside a noise of all modules, a third of the budget."""

    causes: Causes
    count: int = 50
    seed: int = 0
    runs: int = 1  # that of the reference

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        self.noise = np.abs(generator.normal(size=self.count)) / (3 * math.sqrt(self.count))
        self.sizes = generator.choice([1.5, 10, math.inf], len(self.causes))
        self.costs = list(generator.uniform(0.01, 1, self.count))

    def error(self, wide: frozenset[int]) -> float:
        self.runs += 1
        missed = [
            size
            for cause, size in zip(self.causes, self.sizes, strict=True)
            if not wide & set(cause)
        ]
        return math.hypot(*missed, *np.delete(self.noise, sorted(wide)))

    def search(self) -> Search:
        every = frozenset(range(self.count))
        found = Search(self.error, lambda i: self.error(every - {i}), self.costs)
        found.known[every] = 0.0
        return found

    def best(self) -> set[int]:
        """The fewest modules of which each cause has one, and the cheapest of those."""
        members = sorted(set(itertools.chain(*self.causes)))
        sets = (
            s
            for count in range(len(members) + 1)
            for s in itertools.combinations(members, count)
            if all(set(s) & set(cause) for cause in self.causes)
        )
        return set(min(sets, key=lambda s: (len(s), sum(self.costs[i] for i in s))))


CAUSES: dict[str, Causes] = {
    "none": [],
    "one": [(31,)],
    "three": [(0,), (1,), (49,)],
    "pair": [(3, 40)],
    "pairs of a common module": [(3, 40), (3, 7), (3, 22)],
    "any two of three": [(3, 40), (3, 7), (7, 40)],
    "a module and a triple": [(5,), (10, 20, 30)],
    "three triples": [(1, 2, 3), (3, 4, 5), (5, 6, 1)],
    "three of five": list(itertools.combinations((0, 10, 20, 30, 40), 3)),
}


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_modules_repair_planted_causes_in_few_runs(name: str, seed: int) -> None:
    program = Program(CAUSES[name], seed=seed)
    assert program.search().least(BUDGET) == program.best()
    assert program.runs <= 3 * program.count * math.log2(program.count)


@pytest.mark.random
@pytest.mark.parametrize("seed", range(20))
def test_random_causes_need_no_more_modules_than_the_best(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(9, 51))
    causes = [
        tuple(map(int, generator.choice(count, generator.integers(1, 5), replace=False)))
        for _ in range(generator.integers(1, 4))
    ]
    program = Program(causes, count, seed)
    assert program.search().least(BUDGET) == program.best()
    assert program.runs <= 3 * count * math.log2(count)


@pytest.mark.parametrize("count", (9, 20, 50))
@pytest.mark.parametrize("share", (0.2, 0.5, 0.8))
def test_errors_that_add_up_leave_no_module_superfluous(count: int, share: float) -> None:
    program = Program([], count)
    budget = share * math.hypot(*program.noise)
    found = program.search().least(budget)
    assert program.runs <= 3 * count * math.log2(count)
    assert found and program.error(found) <= budget
    assert all(program.error(found - {i}) > budget for i in found)


def test_a_set_whose_rules_miss_the_budget_gets_another_module() -> None:
    program = Program([(5,), (10, 20)])
    applied = Program([(5,), (10, 20), (30, 31)])  # a cause that the search does not see
    found, error, attempts = program.search().confirmed(BUDGET, applied.error)
    assert error <= BUDGET and found >= {5} and 1 < attempts < 8

"""The search for the cheapest modules: on planted causes, and compared with brute force."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.core.policy import get_policy
from policy.inspect.suggest.applied import applied, rules_for
from policy.inspect.suggest.search import Search, subsets
from policy.inspect.suggest.suggest import suggest
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import Call, program_of

F32 = jnp.float32
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
        sizes = zip(self.causes, self.sizes, strict=True)
        missed = [size for cause, size in sizes if not wide & set(cause)]
        return math.hypot(*missed, *np.delete(self.noise, sorted(wide)))

    def search(self) -> Search:
        every = frozenset(range(self.count))
        found = Search(self.error, lambda i: self.error(every - {i}), self.costs)
        found.known[every] = 0.0
        return found


def requires_all(program: Program, found: frozenset[int] | None) -> bool:
    """Whether modules meet the budget in few runs, and none of them is superfluous."""
    assert program.runs <= 3 * program.count * math.log2(program.count)
    assert found is not None and program.error(found) <= BUDGET
    return all(program.error(found - {i}) > BUDGET for i in found)


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
def test_modules_repair_planted_causes_in_few_runs(name: str, seed: int) -> None:
    program = Program(CAUSES[name], seed=seed)
    assert requires_all(program, program.search().least(BUDGET))


@pytest.mark.random
@pytest.mark.parametrize("seed", range(20))
def test_random_causes_leave_no_module_superfluous(seed: int) -> None:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(9, 51))
    causes = [
        tuple(map(int, generator.choice(count, generator.integers(1, 5), replace=False)))
        for _ in range(generator.integers(1, 4))
    ]
    program = Program(causes, count, seed)
    assert requires_all(program, program.search().least(BUDGET))


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
    tried: list[float] = []

    def error_of(wide: frozenset[int]) -> float:
        tried.append(applied.error(wide))
        return tried[-1]

    found, error = program.search().confirmed(BUDGET, error_of)
    assert error == tried[-1] <= BUDGET and found >= {5} and 1 < len(tried) < 8


def test_rules_under_which_the_code_overflows_do_not_shrink_the_budget() -> None:
    program = Program([(5,), (10, 20)])
    search = program.search()
    first = search.least(BUDGET)
    errors = lambda wide: math.inf if wide == first else program.error(wide)  # noqa: E731
    found, error = program.search().confirmed(BUDGET, errors)
    assert error <= BUDGET and found != first and len(found) < program.count


# ------------------------------------------------------------------------------- beside brute force

DEARER = 1.05


def network(seed: int, modules: int) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(seed)
    kinds = [generator.choice(["dense", "offset", "scaled", "exp", "gate"]) for _ in range(modules)]
    offsets, skips = 10 ** generator.uniform(0, 3, modules), generator.integers(2, size=modules)
    widths = generator.choice([4, 8, 16], modules)
    ws = [jnp.asarray(generator.normal(size=(2, 8, width)) / 3, F32) for width in widths]

    def model(ws: Any, x: Any) -> Any:
        for i, (kind, w) in enumerate(zip(kinds, ws, strict=True)):
            with jax.named_scope(f"module_{i}"):
                y = jnp.tanh(x @ w[0]) @ w[1].T
                y = (y + F32(offsets[i])) - F32(offsets[i]) if kind == "offset" else y
                y = y * F32(0.1) if kind == "scaled" else y
                y = jnp.log1p(jnp.exp(y)) if kind == "exp" else y
                y = y * jax.nn.sigmoid(y) if kind == "gate" else y
                x = x + y if skips[i] else y
        return x

    return model, ws, jnp.asarray(generator.normal(size=(4, 8)), F32)


def trial_of(model: Any, arguments: Any, policy: str) -> Trial:
    call, of = Call.measured("suggest", model, arguments, {}, None, None), get_policy(policy)
    return Trial(call, of, program_of(call, of), None)


def sets_of(trial: Trial) -> list[frozenset[int]]:
    return list(subsets(range(len(trial.paths))))


def is_cheap(trial: Trial, found: Any, errors: dict[frozenset[int], float], budget: float) -> bool:
    cost = lambda wide: sum(trial.costs[i] for i in wide)  # noqa: E731
    return cost(found) <= DEARER * min(cost(wide) for wide in errors if errors[wide] <= budget)


def budgets(errors: dict[Any, float]) -> list[float]:
    """Between the least and the largest error, and none that is one of them."""
    found = sorted({error for error in errors.values() if 0 < error < math.inf})
    return [1.001 * found[len(found) * k // 4] for k in range(1, 4)]


CASES = [(seed, modules, "mixed_float16") for seed, modules in ((0, 4), (1, 6), (2, 8))]


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    ("seed", "modules", "policy"),
    [*CASES, (2, 8, "mixed_bfloat16"), (3, 8, "mixed_bfloat16")],
)
def test_the_set_that_is_found_is_the_cheapest_of_all_subsets(seed, modules, policy):
    model, *arguments = network(seed, modules)
    trial = trial_of(model, arguments, policy)
    assert len(trial.paths) == modules
    errors = {wide: trial.measure(wide) for wide in sets_of(trial)}
    for budget in budgets(errors):
        found = Search(trial.measure, trial.measure_alone, trial.costs).least(budget)
        assert found is not None and errors[found] <= budget
        assert is_cheap(trial, found, errors, budget)


@pytest.mark.slow
def test_the_applied_rules_cost_no_more_than_the_cheapest_that_meet_the_budget() -> None:
    model, *arguments = network(4, 3)
    policy = "mixed_bfloat16"
    trial = trial_of(model, arguments, policy)
    errors = {wide: applied(trial, wide, rules_for(trial, wide))[1] for wide in sets_of(trial)}
    budget = budgets(errors)[1]
    found = suggest(model, *arguments, error=budget, policy=policy)
    wide = [i for i, path in enumerate(trial.paths) if "/".join(path) in found.paths]
    assert found.error <= budget and is_cheap(trial, wide, errors, budget)

"""The search for the fewest or cheapest modules: on planted causes, and beside brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from mpmodules import nnx
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


# ------------------------------------------------------------------------------- beside brute force

DEARER = 1.05


def network(seed: int, modules: int) -> tuple[Any, Any, Any]:
    """Modules of several widths, some of which lose digits, scale, or are skipped."""
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
    """Returns whether a set costs hardly more than the cheapest of all that meet a budget."""
    cost = lambda wide: sum(trial.costs[i] for i in wide)  # noqa: E731
    return cost(found) <= DEARER * min(cost(wide) for wide in errors if errors[wide] <= budget)


def budgets(errors: dict[Any, float]) -> list[float]:
    """Between the least and the largest error, and none that is one of them."""
    found = sorted({error for error in errors.values() if 0 < error < math.inf})
    return [1.001 * found[len(found) * k // 4] for k in range(1, 4)]


CASES = [(seed, modules, "mixed_float16") for seed, modules in ((0, 4), (1, 6), (2, 8))]


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


def test_the_applied_rules_cost_no_more_than_the_cheapest_that_meet_the_budget() -> None:
    model, *arguments = network(4, 3)
    policy = "mixed_bfloat16"
    trial = trial_of(model, arguments, policy)
    errors = {wide: applied(trial, wide, rules_for(trial, wide))[1] for wide in sets_of(trial)}
    budget = budgets(errors)[1]
    found = suggest(model, *arguments, error=budget, policy=policy)
    wide = [i for i, path in enumerate(trial.paths) if "/".join(path) in found.paths]
    assert found.error <= budget and is_cheap(trial, wide, errors, budget)


# --------------------------------------------------------------------------------------- 50 modules

COUNT = 50
# The model loses a part of its outputs where all modules of a cause are in half precision.
LOST = [(7,), (12, 40), (12, 33)]
PLANTED = {i for cause in LOST for i in cause}
X = np.array([1.0, 1 + 2.0**-12], np.float32)  # bfloat16 rounds both to 1


def kernel(i: int) -> Any:
    """Returns the difference of both inputs, magnified, for a planted layer; else a small sum."""
    return jnp.array([[-4096.0], [4096.0]]) if i in PLANTED else jnp.full((2, 1), 0.01)


def total(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    """Returns a little from most layers, and what the first of each cause returns that is not 0."""
    outputs = [layer(x) for layer in layers]
    found = [y for i, y in enumerate(outputs) if i not in PLANTED]
    for first, *others in LOST:
        y = outputs[first]
        for i in others:
            y = jnp.where(y == 0, outputs[i], y)
        found.append(y)
    return jnp.concatenate(found)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return total([nn.Dense(1, use_bias=False, name=f"layer_{i}") for i in range(COUNT)], x)


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        kernels = [lambda *_, i=i: kernel(i) for i in range(COUNT)]
        options: Any = {"use_bias": False, "rngs": nnx.Rngs(0)}
        self.layer = nnx.List([nnx.Linear(2, 1, kernel_init=k, **options) for k in kernels])

    def __call__(self, x: Any) -> Any:
        return total(self.layer, x)


def call_of(wing: str) -> tuple[Any, ...]:
    """Returns the function and its arguments."""
    if wing == "nnx":
        return NnxModel(), X
    params = {f"layer_{i}": {"kernel": kernel(i)} for i in range(COUNT)}
    return LinenModel().apply, {"params": params}, X


@pytest.mark.parametrize("wing", ("linen", "nnx"))
def test_of_fifty_modules_the_fewest_that_repair_all_causes_are_kept(wing: str) -> None:
    found = suggest(*call_of(wing), error=0.1, policy="mixed_bfloat16")
    assert len(found.paths) == len(found.rules) == 2
    assert {int(path[6:]) for path in found.paths} == {7, 12}
    assert found.error <= 0.1 < found.without
    count = len(found.evidence)
    assert count >= COUNT and found.runs <= 3 * count * math.log2(count)

"""suggest against brute force: its rules cost at most 1.05 of the cheapest set of all that meets
the budget.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.core.policy import get_policy
from policy.inspect.suggest import search
from policy.inspect.suggest.applied import applied, rules_for
from policy.inspect.suggest.search import Search
from policy.inspect.suggest.suggest import suggest
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import Call, program_of

F32 = jnp.float32
DEARER = 1.05


def network(seed: int, modules: int) -> tuple[Any, Any, Any]:
    """Modules of several widths, of which some lose digits in an offset, scale, or are skipped by a
    residual.
    """
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


def subsets(trial: Trial) -> list[frozenset[int]]:
    return list(search.subsets(range(len(trial.paths))))


def cheapest(trial: Trial, errors: dict[frozenset[int], float], budget: float) -> float:
    return min(cost(trial, wide) for wide, error in errors.items() if error <= budget)


def cost(trial: Trial, wide: Any) -> float:
    return sum(trial.costs[i] for i in wide)


def budgets(errors: dict[Any, float]) -> list[float]:
    """Between the least and the largest error, and none that is one of them."""
    found = sorted({error for error in errors.values() if 0 < error < math.inf})
    return [1.001 * found[len(found) * k // 4] for k in range(1, 4)]


CASES = [
    (0, 4, "mixed_float16"),
    (1, 6, "mixed_float16"),
    (2, 8, "mixed_float16"),
    (2, 8, "mixed_bfloat16"),
    (3, 8, "mixed_bfloat16"),
]


@pytest.mark.parametrize(("seed", "modules", "policy"), CASES)
def test_the_set_that_is_found_is_the_cheapest_of_all_subsets(
    seed: int, modules: int, policy: str
) -> None:
    model, *arguments = network(seed, modules)
    trial = trial_of(model, arguments, policy)
    assert len(trial.paths) == modules
    errors = {wide: trial.measure(wide) for wide in subsets(trial)}
    for budget in budgets(errors):
        found = Search(trial.measure, trial.measure_alone, trial.costs).least(budget)
        assert found is not None and errors[found] <= budget
        assert cost(trial, found) <= DEARER * cheapest(trial, errors, budget)


def test_the_applied_rules_cost_no_more_than_the_cheapest_that_meet_the_budget() -> None:
    model, *arguments = network(4, 3)
    policy = "mixed_bfloat16"
    trial = trial_of(model, arguments, policy)
    errors = {wide: applied(trial, wide, rules_for(trial, wide))[1] for wide in subsets(trial)}
    budget = budgets(errors)[1]
    found = suggest(model, *arguments, error=budget, policy=policy)
    wide = [i for i, path in enumerate(trial.paths) if "/".join(path) in found.paths]
    assert found.error <= budget
    assert cost(trial, wide) <= DEARER * cheapest(trial, errors, budget)

"""Confirms that rules meet a budget, by runs in which they are applied."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policy.core.rules import PolicyRules
from policy.inspect.suggest.applied import applied, rules_for
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Evidence, Suggestion
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import short_text
from policy.programs.paths import spelled


def search_of(trial: Trial, costs: Sequence[float]) -> Search:
    """Returns a search of the candidates of a trial, with a budget of two runs for each."""
    search = Search(trial.measure, trial.measure_alone, costs, 2 * len(costs) - 1)
    if not trial.outside:
        search.known[search.every] = 0.0
    return search


def confirmed(trial: Trial, search: Search, budget: float) -> tuple[WideModules, Suggestion]:
    """Returns a set of candidates and its suggestion, once its rules met the budget in a run.

    Raises:
      ValueError: no rules meet the budget.
    """
    rules: dict[WideModules, PolicyRules] = {}

    def error(wide: WideModules) -> float:
        rules[wide], found = applied(trial, wide, rules_for(trial, wide))
        return found

    wide, found, attempts = search.confirmed(budget, error)
    if found <= budget:
        return wide, suggestion_of(trial, search, wide, rules[wide], budget, found, attempts)
    raise ValueError(
        f"No rules meet an error of {budget:.3g}: with every path in float32 it is {found:.3g}"
        + (", from operations outside of any module" if trial.outside else "")
        + ". Allow a larger error, or find its source with policy.compare."
    )


def suggestion_of(
    trial: Trial,
    search: Search,
    wide: WideModules,
    rules: PolicyRules,
    budget: float,
    error: float,
    confirmations: int,
) -> Suggestion:
    """Returns the suggestion of a set of candidates, whose rules have an error when applied."""
    alone = search.alone or [math.nan] * len(trial.paths)
    evidence = [
        Evidence(spelled(path), alone[i], search.costs[i], i in wide)
        for i, path in enumerate(trial.paths)
    ]
    return Suggestion(
        rules,
        "" if trial.policy is None else short_text(trial.policy),
        budget,
        error,
        search.known.get(wide, math.nan),
        search.known.get(frozenset(), math.nan),
        tuple(
            sorted(evidence, key=lambda e: (not e.keeps, -e.alone if e.alone == e.alone else 0.0))
        ),
        "gradients" if trial.program.gradients else "outputs",
        trial.program.route,
        trial.runs,
        1 + confirmations,
    )

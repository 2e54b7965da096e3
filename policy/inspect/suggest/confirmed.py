"""Confirms that rules meet a budget, by runs in which they are applied."""

from __future__ import annotations

import math

from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.applied import applied
from policy.inspect.suggest.search import FEW, Search, WideModules
from policy.inspect.suggest.suggestion import Evidence, Suggestion
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import Call, Program, short_text
from policy.programs.paths import spelled

_MOST_CONFIRMATIONS = 6


def confirmed(
    call: Call, policy: Policy | None, program: Program, trial: Trial, search: Search, budget: float
) -> Suggestion:
    """Returns the suggestion, once its rules have met the budget in a measured run.

    Sets that cost less and are predicted to miss the budget by little are tried first: some of them
    meet it. After a miss the next set is chosen, and after two misses for a budget reduced by the
    factor of the emulation's optimism. Each miss costs one more compilation; the last set tried has
    every path in float32.
    """
    nearly = search.nearly(search.least(budget), budget)
    goal, tried, found, hopeful = budget, set(), math.inf, 1.0
    for attempt in range(1, len(nearly) + _MOST_CONFIRMATIONS + 1):
        if attempt <= len(nearly):
            wide = nearly[attempt - 1]
        else:
            wide = search.least(goal) if attempt < len(nearly) + _MOST_CONFIRMATIONS else None
        wide = search.every if wide is None or wide in tried else wide
        tried.add(wide)
        rules, outputs = applied(call, policy, program, trial, wide)
        found = trial.error(outputs)
        if found <= budget:
            return suggestion_of(
                rules, policy, program, trial, search, wide, budget, found, attempt
            )
        if wide == search.every:
            break
        search.refused.add(wide)
        if attempt > len(nearly) + (2 if len(trial.paths) <= FEW else 0):
            emulated = search.known.get(wide, found)
            hopeful = max(hopeful, found / emulated if emulated else math.inf)
            goal = 0.999 * budget / hopeful
    raise ValueError(
        f"No rules meet an error of {budget:.3g}: with every path in float32 it is {found:.3g}"
        + (", from operations outside of any module" if trial.outside else "")
        + ". Allow a larger error, or find its source with policy.compare."
    )


def suggestion_of(
    rules: PolicyRules,
    policy: Policy | None,
    program: Program,
    trial: Trial,
    search: Search,
    wide: WideModules,
    budget: float,
    found: float,
    confirmations: int,
) -> Suggestion:
    alone = search.alone or [math.nan] * len(trial.paths)
    evidence = [
        Evidence(spelled(path), alone[i], search.costs[i], i in wide)
        for i, path in enumerate(trial.paths)
    ]
    return Suggestion(
        rules,
        "" if policy is None else short_text(policy),
        budget,
        found,
        search.known.get(wide, math.nan),
        search.known.get(frozenset(), math.nan),
        tuple(
            sorted(evidence, key=lambda e: (not e.keeps, -e.alone if e.alone == e.alone else 0.0))
        ),
        "gradients" if program.gradients else "outputs",
        program.route,
        trial.runs,
        1 + confirmations,
    )

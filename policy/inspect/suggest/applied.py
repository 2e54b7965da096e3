"""Applies rules for real: the error under them, and suggestions whose rules met a budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.patterns import patterns_of
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Evidence, Suggestion
from policy.inspect.suggest.trial import Trial, compared_floats
from policy.inspect.traced.call import Program, short_text
from policy.inspect.traced.upcast import dtypes_of
from policy.programs.jaxprs import opened
from policy.programs.paths import spelled

T = TypeVar("T")
Choices = Sequence[PolicyRules]  # to try, in this order


def rules_for(trial: Trial, wide: WideModules) -> Choices:
    """Returns the rules to try for a set of candidates in float32, all others in half precision.

    If the code can't take float32 from a layer, as in a sum under strict promotion or the carry of
    a scan, the layers in float32 return half precision: by the second choice.
    """
    paths = trial.paths_of(wide)
    half, full = trial.policy or _own_policy(trial.program), get_policy("float32")
    fulls = [full]
    if trial.program.route != "autocast" and trial.policy is not None:
        fulls.append(full.replace(output_dtype=trial.policy.compute_dtype))
    is_wide = {path: path in paths for path in trial.paths}
    named = patterns_of(is_wide, trial.modules)
    return [PolicyRules([(p, full if wide else half) for p, wide in named]) for full in fulls]


def _own_policy(program: Program) -> Policy:
    """Returns the policy of the half-precision dtypes that a program names itself."""
    dtypes = dtypes_of(opened(program.jaxpr)[0])
    is_float16 = jnp.float16 in dtypes and jnp.bfloat16 not in dtypes
    return get_policy("mixed_float16" if is_float16 else "mixed_bfloat16")


def applied(trial: Trial, wide: WideModules, choices: Choices) -> tuple[PolicyRules, float]:
    """Returns the first rules under which the code runs, and the error under them.

    Args:
      trial: the compiled program.
      wide: the candidates that the rules keep in float32.
      choices: rules to try, in this order.
    """
    return first_that_runs(choices, lambda rules: _error(trial, wide, rules))


def first_that_runs(choices: Choices, run: Callable[[PolicyRules], T]) -> tuple[PolicyRules, T]:
    """Returns the first rules under which the code runs, and the result of `run` for them."""
    *others, last = choices
    for rules in others:
        with contextlib.suppress(TypeError, ValueError):
            return rules, run(rules)
    return last, run(last)


def _error(trial: Trial, wide: WideModules, rules: PolicyRules) -> float:
    program = trial.program
    if program.route == "as written" and trial.ported is None:  # nothing applies rules
        return trial.measure(wide, promotes=False)
    under = _under(trial, rules)
    run = jex_core.jaxpr_as_fun(under.jaxpr)
    floats = lambda *arrays: compared_floats(program, run(*arrays))  # noqa: E731
    outputs = program.compiled(floats)(*program.arguments.arrays)
    return trial.error(jax.device_get(outputs))


def _under(trial: Trial, rules: PolicyRules) -> Program:
    if trial.ported is not None:
        return trial.ported(rules)
    return trial.call.under(trial.policy, rules if rules else None, trial.program.route)


def confirmed(
    trial: Trial, search: Search, budget: float
) -> tuple[WideModules, PolicyRules, float]:
    """Returns the candidates, the rules and the error of a set whose rules met the budget in a run.

    Raises:
      ValueError: no rules meet the budget.
    """
    rules: dict[WideModules, PolicyRules] = {}

    def error(wide: WideModules) -> float:
        rules[wide], found = applied(trial, wide, rules_for(trial, wide))
        return found

    wide, found = search.confirmed(budget, error)
    if found <= budget:
        return wide, rules[wide], found
    outside = ", from operations outside of any module" if trial.outside else ""
    raise ValueError(
        f"No rules meet an error of {budget:.3g}: with every path in float32 it is {found:.3g}"
        f"{outside}. Allow a larger error, or find its source with policy.compare."
    )


def suggestion_of(
    trial: Trial,
    search: Search,
    wide: WideModules,
    rules: PolicyRules,
    budget: float,
    error: float,
) -> Suggestion:
    """Returns the suggestion of a set of candidates, whose rules have an error when applied."""
    alone = search.alone or [math.nan] * len(trial.paths)
    evidence = [
        Evidence(spelled(path), alone[i], search.costs[i], i in wide)
        for i, path in enumerate(trial.paths)
    ]
    evidence.sort(key=lambda e: (not e.keeps, 0.0 if math.isnan(e.alone) else -e.alone))
    return Suggestion(
        rules,
        "" if trial.policy is None else short_text(trial.policy),
        budget,
        error,
        search.known.get(frozenset(), math.nan),
        tuple(evidence),
        "gradients" if trial.program.gradients else "outputs",
        trial.program.route,
        trial.runs,
        notes=tuple(filter(None, [trial.program.note_on_draws()])),
    )

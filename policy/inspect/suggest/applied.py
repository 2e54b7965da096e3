"""Applies rules for real: the error of a program under them, and rules that meet a budget."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import jax
import jax.extend.core as jex_core
import numpy as np

from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.patterns import patterns_of
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.trial import Trial, compared_floats, compiled
from policy.programs.paths import Path

T = TypeVar("T")
PathState = Literal["half", "float32", "8 bits"]  # of a path
Choices = Sequence[PolicyRules]  # to try, in this order


def rules_for(trial: Trial, wide: WideModules) -> Choices:
    """Returns the rules to try for a set of candidates in float32, all others in half precision."""
    paths = trial.paths_of(wide)
    states: dict[Path, PathState] = {p: "float32" if p in paths else "half" for p in trial.paths}
    half = trial.policy or get_policy("mixed_bfloat16")
    return rules_of_states(trial, states, "half", lambda pattern: half)


def rules_of_states(
    trial: Trial,
    states: Mapping[Path, PathState],
    default: PathState,
    half: Callable[[str], Policy],
    eight: Policy | None = None,
) -> Choices:
    """Returns the rules to try that give each path its state.

    If the code can't take float32 from a layer, as in a sum under strict promotion or the carry of
    a scan, the layers in float32 return half precision: by the second choice.

    Args:
      trial: the compiled program.
      states: of its paths.
      default: the state of paths without a rule.
      half: returns the policy in half precision of a pattern.
      eight: the policy of paths in 8 bits; None for none.
    """
    full = get_policy("float32")
    fulls = [full]
    if trial.program.route == "scope" and trial.policy is not None:
        fulls.append(full.replace(output_dtype=trial.policy.compute_dtype))
    named: list[tuple[str, PathState]] = patterns_of(states, default)
    found: list[PolicyRules] = []
    for full in fulls:
        policies = {"float32": full, "8 bits": eight}
        found.append(PolicyRules([(p, policies.get(state) or half(p)) for p, state in named]))
    return found


def applied(
    trial: Trial, wide: WideModules, choices: Choices, policy: Policy | None = None
) -> tuple[PolicyRules, float]:
    """Returns the first rules under which the code runs, and the error under them.

    Args:
      trial: the compiled program.
      wide: the candidates that the rules keep in float32.
      choices: rules to try, in this order.
      policy: the policy beside the rules; None for that of the trial.
    """
    return first_that_runs(choices, lambda rules: _error(trial, wide, rules, policy))


def first_that_runs(choices: Choices, run: Callable[[PolicyRules], T]) -> tuple[PolicyRules, T]:
    """Returns the first rules under which the code runs, and the result of `run` for them."""
    *others, last = choices
    for rules in others:
        with contextlib.suppress(TypeError, ValueError):
            return rules, run(rules)
    return last, run(last)


def _error(trial: Trial, wide: WideModules, rules: PolicyRules, policy: Policy | None) -> float:
    program, arrays = trial.program, trial.program.arguments.arrays
    if program.route == "as written":
        flags = trial.flags(wide, promotes=False)
        native = functools.partial(trial.emulated, is_native=True)
        outputs = compiled(program, native, flags)(flags, *arrays)
    else:
        under = trial.call.under(policy or trial.policy, rules if rules else None, program.route)
        run = jex_core.jaxpr_as_fun(under.jaxpr)
        outputs = compiled(program, lambda *arrays: compared_floats(program, run(*arrays)))(*arrays)
    measured: list[np.ndarray] = jax.device_get(outputs)
    return trial.error(measured)


def confirmed(
    trial: Trial, search: Search, budget: float
) -> tuple[WideModules, PolicyRules, float, int]:
    """Returns the candidates, the rules and the error of a set whose rules met the budget in a run,
    and the number of such runs.

    Raises:
      ValueError: no rules meet the budget.
    """
    rules: dict[WideModules, PolicyRules] = {}

    def error(wide: WideModules) -> float:
        rules[wide], found = applied(trial, wide, rules_for(trial, wide))
        return found

    wide, found, attempts = search.confirmed(budget, error)
    if found <= budget:
        return wide, rules[wide], found, attempts
    raise ValueError(
        f"No rules meet an error of {budget:.3g}: with every path in float32 it is {found:.3g}"
        + (", from operations outside of any module" if trial.outside else "")
        + ". Allow a larger error, or find its source with policy.compare."
    )

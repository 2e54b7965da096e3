"""Applies rules for real: the outputs of a program with a set of paths in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex_core
import numpy as np

from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.patterns import patterns_of
from policy.inspect.suggest.rounding_emulator import Ruled
from policy.inspect.suggest.search import WideModules
from policy.inspect.suggest.trial import Trial, compared_floats, compiled
from policy.programs.placed_interpreter import PlacedValue
from policy.programs.subprograms import opened

T = TypeVar("T")


def rules_for(trial: Trial, wide: WideModules) -> list[PolicyRules]:
    """Returns the rules to try for a set of candidates, in this order."""
    named = patterns_of(trial.paths_of(wide), trial.paths)
    half = trial.policy or get_policy("mixed_bfloat16")
    return [
        PolicyRules([(pattern, full if is_wide else half) for pattern, is_wide in named])
        for full in full_policies(trial)
    ]


def full_policies(trial: Trial) -> list[Policy]:
    """Returns the policies to try for paths in float32, in this order.

    If the code can't take float32 from a layer, as in a sum under strict promotion or the carry of
    a scan, the layers in float32 return half precision: by the second policy.
    """
    full = get_policy("float32")
    if trial.program.route != "scope" or trial.policy is None:
        return [full]
    return [full, full.replace(output_dtype=trial.policy.compute_dtype)]


def applied(
    trial: Trial, wide: WideModules, choices: Sequence[PolicyRules], policy: Policy | None = None
) -> tuple[PolicyRules, float]:
    """Returns the first rules under which the code runs, and the error under them.

    Args:
      trial: the compiled program.
      wide: the candidates that the rules keep in float32.
      choices: rules to try, in this order.
      policy: the policy beside the rules; None for that of the trial.
    """
    return first_that_runs(choices, lambda rules: _error(trial, wide, rules, policy))


def first_that_runs(
    choices: Sequence[PolicyRules], run: Callable[[PolicyRules], T]
) -> tuple[PolicyRules, T]:
    """Returns the first rules under which the code runs, and the result of `run` for them."""
    *others, last = choices
    for rules in others:
        with contextlib.suppress(TypeError, ValueError):
            return rules, run(rules)
    return last, run(last)


def _error(trial: Trial, wide: WideModules, rules: PolicyRules, policy: Policy | None) -> float:
    program = trial.program
    if program.route == "as written":
        body, consts = opened(program.jaxpr)

        def run(*arrays: Any) -> list[PlacedValue]:
            ruled = Ruled(trial.paths_of(wide), trial.candidates, program.reference)
            return ruled.run(body, list(map(_value, consts)), list(map(_value, arrays)))

    else:
        under = trial.call.under(policy or trial.policy, rules if rules else None, program.route)
        ruled = jex_core.jaxpr_as_fun(under.jaxpr)
        run = lambda *arrays: list(map(_value, ruled(*arrays)))  # noqa: E731
    ready = compiled(program, lambda *arrays: compared_floats(program, run(*arrays)))
    outputs: list[np.ndarray] = jax.device_get(ready(*program.arguments.arrays))
    return trial.error(outputs)


def _value(array: Any) -> PlacedValue:
    return PlacedValue([array])

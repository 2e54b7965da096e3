"""Confirms that layers in 8 bits meet a budget, by runs in which their rules are applied."""

from __future__ import annotations

import dataclasses

import numpy as np

from policy.core.matmul_dtypes import ScaledMatmul
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.applied import measured_outputs
from policy.inspect.suggest.eight_bits import EightBitSearch, full_policies, rules_of
from policy.inspect.suggest.scaled_dots import ScaledDots, scaled_dots
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.traced.call import Call, Program, short_text


def scaled_of(
    call: Call, policy: Policy, by: ScaledMatmul, program: Program, modules: set[str] | None
) -> ScaledDots:
    """Returns the matmuls of a program that run in 8 bits under a policy with ``m=``."""
    eight = call.traced(policy.replace(matmul=by), None, program.route).jaxpr
    found = scaled_dots(program.jaxpr, eight, call.differentiated(), by, modules)
    if not found.layers:
        raise ValueError(
            f"m={by.text} applies to matmuls of a parameter inside a module, and this call has "
            "none. params= selects the arguments that are parameters."
        )
    return found


def confirmed_in_8_bits(
    call: Call, policy: Policy, program: Program, layers: EightBitSearch, found: Suggestion
) -> Suggestion:
    """Returns a suggestion for a policy with ``m=``, once its rules have met the budget.

    Where no layer may run in 8 bits it is the given one, with the reasons.

    Args:
      found: the suggestion for the policy without ``m=``.
    """
    measured: list[tuple[PolicyRules, float]] = []

    def met(chosen: frozenset[int]) -> bool:
        rules, outputs = _applied_in_8_bits(call, policy, program, layers, chosen)
        measured.append((rules, layers.trial.error(outputs)))
        return measured[-1][1] <= layers.budget

    chosen, is_met = layers.sets(met)
    by = "" if policy.matmul is None else policy.matmul.text
    found = dataclasses.replace(
        found,
        matmul=by,
        smallest=layers.smallest,
        layers=layers.evidence(chosen),
        runs=layers.trial.runs,
        compilations=found.compilations + len(measured),
    )
    if not is_met:
        return found
    rules, error = measured[-1]
    emulated = layers.trial.measure_in_8_bits(layers.wide, chosen)
    return dataclasses.replace(
        found, rules=rules, policy=short_text(policy), error=error, emulated=emulated
    )


def _applied_in_8_bits(
    call: Call,
    policy: Policy,
    program: Program,
    layers: EightBitSearch,
    chosen: frozenset[int],
) -> tuple[PolicyRules, list[np.ndarray]]:
    """Returns rules for a set of layers in 8 bits, and the function's outputs under them.

    As `policy.inspect.suggest.applied.applied` does where code can't take float32 from a layer.
    """
    states = layers.states(chosen)
    full, narrow = full_policies(policy)
    rules = rules_of(states, policy, full)
    try:
        return rules, measured_outputs(call, policy, program, layers.trial, layers.wide, rules)
    except (TypeError, ValueError):
        if program.route != "scope" or not layers.wide:
            raise
    rules = rules_of(states, policy, narrow)
    return rules, measured_outputs(call, policy, program, layers.trial, layers.wide, rules)

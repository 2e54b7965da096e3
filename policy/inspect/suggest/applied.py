"""Applies rules for real: the outputs of a program with a set of paths in float32."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.inspect.compare.float32_values import first_array, lane_of
from policy.inspect.suggest.patterns import patterns_of
from policy.inspect.suggest.rounding_emulator import Ruled
from policy.inspect.suggest.search import WideModules
from policy.inspect.suggest.trial import Trial, compiled, floats_of
from policy.inspect.traced.call import Call, Program
from policy.programs.placed_interpreter import PlacedValue
from policy.programs.subprograms import opened


def applied(
    call: Call, policy: Policy | None, program: Program, trial: Trial, wide: WideModules
) -> tuple[PolicyRules, list[np.ndarray]]:
    """Returns rules for a set of candidates, and the function's outputs under them.

    They are the first of `rules_for` under which the code runs.
    """
    *others, last = rules_for(program, trial, wide, policy)
    for rules in others:
        with contextlib.suppress(TypeError, ValueError):
            return rules, measured_outputs(call, policy, program, trial, wide, rules)
    return last, measured_outputs(call, policy, program, trial, wide, last)


def rules_for(
    program: Program, trial: Trial, wide: WideModules, policy: Policy | None
) -> list[PolicyRules]:
    """Returns the rules to try for a set of candidates, in this order.

    If the code can't take float32 from a layer, as in a sum under strict promotion or the carry of
    a scan, the layers in float32 return half precision: by the second rules.
    """
    kept = frozenset(trial.paths[i] for i in wide)
    named = patterns_of(kept, trial.paths)
    half, full = policy or get_policy("mixed_bfloat16"), get_policy("float32")
    wider = [full]
    if program.route == "scope" and policy is not None:
        wider.append(full.replace(output_dtype=policy.compute_dtype))
    return [
        PolicyRules([(pattern, full if is_wide else half) for pattern, is_wide in named])
        for full in wider
    ]


def measured_outputs(
    call: Call,
    policy: Policy | None,
    program: Program,
    trial: Trial,
    wide: WideModules,
    rules: PolicyRules,
) -> list[np.ndarray]:
    """Returns the measured outputs of the program that the rules give."""
    if program.route == "as written":
        kept = frozenset(trial.paths[i] for i in wide)
        body, consts = opened(program.jaxpr)

        def run(*arrays: Any) -> list[PlacedValue]:
            ruled = Ruled(kept, trial.candidates)
            ruled.lane = lane_of(program.reference, first_array)
            return ruled.ended(
                ruled.run(body, list(map(_value, consts)), list(map(_value, arrays)))
            )

    else:
        ruled = jex_core.jaxpr_as_fun(
            call.traced(policy, rules if rules else None, program.route).jaxpr
        )
        run = lambda *arrays: [PlacedValue([output]) for output in ruled(*arrays)]  # noqa: E731
    ready = compiled(program, lambda *arrays: floats_of(program, run(*arrays)))
    return jax.device_get(ready(*program.arguments.arrays))


def _value(array: Any) -> PlacedValue:
    return PlacedValue([array])

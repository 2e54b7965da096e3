"""Applies rules for real: the error under them, and suggestions whose rules met a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import jax
import jax.extend.core as jex_core

from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.eight_bits import LayerEvidence, ScaledDots
from policy.inspect.suggest.patterns import patterns_of
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Evidence, Suggestion
from policy.inspect.suggest.trial import Trial, compared_floats
from policy.inspect.traced.call import short_text
from policy.programs.paths import Path, divided, spelled

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
    named: list[tuple[str, PathState]] = patterns_of(states, default, trial.modules)
    policies = [{"float32": full, "8 bits": eight} for full in fulls]
    return [PolicyRules([(p, by.get(state) or half(p)) for p, state in named]) for by in policies]


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
        outputs = program.compiled(native, flags)(flags, *arrays)
    else:
        under = trial.call.under(policy or trial.policy, rules if rules else None, program.route)
        run = jex_core.jaxpr_as_fun(under.jaxpr)
        floats = lambda *arrays: compared_floats(program, run(*arrays))  # noqa: E731
        outputs = program.compiled(floats)(*arrays)
    return trial.error(jax.device_get(outputs))


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
    confirmations: int,
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
        search.known.get(wide, math.nan),
        search.known.get(frozenset(), math.nan),
        tuple(evidence),
        "gradients" if trial.program.gradients else "outputs",
        trial.program.route,
        trial.runs,
        1 + confirmations,
        notes=tuple(filter(None, [trial.program.note_on_draws()])),
    )


# --------------------------------------------------------------------------------------------------
# Layers in 8 bits
# --------------------------------------------------------------------------------------------------


def suggestion_in_8_bits(
    trial: Trial,
    scaled: ScaledDots,
    policy: Policy,
    wide: WideModules,
    budget: float,
    smallest: int,
    found: Suggestion,
) -> Suggestion:
    """Returns a suggestion for a policy with ``m=``, whose rules met the budget when applied.

    Where no layer may run in 8 bits it is the given one, with the reasons.

    Args:
      trial: the compiled program.
      scaled: the matmuls that may run in 8 bits.
      policy: the policy with ``m=``.
      wide: the candidates of `trial` that are kept in float32.
      budget: the error allowed.
      smallest: the least contraction and number of outputs of a layer to run in 8 bits.
      found: the suggestion for the policy without ``m=``.
    """
    in_float32 = trial.paths_of(wide)
    layers = list(_evidence(trial, scaled, in_float32, smallest))
    free = [i for i, one in enumerate(layers) if not one.kept]

    def chosen(kept: WideModules) -> frozenset[int]:
        return frozenset(layer for i, layer in enumerate(free) if i not in kept)

    def measure(kept: WideModules) -> float:
        return trial.measure(wide, chosen(kept))

    def error(kept: WideModules) -> float:
        if kept == search.every:
            return 0.0
        states = _states(trial, scaled, in_float32, chosen(kept))
        half = out_of_8_bits(states, policy)
        choices = rules_of_states(trial, states, "8 bits", half, policy)
        tried[kept] = applied(trial, wide, choices, policy)
        return tried[kept][1]

    tried: dict[WideModules, tuple[PolicyRules, float]] = {}
    alone = [layers[i].alone for i in free]
    search = Search(measure, alone.__getitem__, [layers[i].cost for i in free], alone)
    search.known[search.every] = 0.0  # confirmed without 8 bits
    kept, _, _ = search.confirmed(budget, error)
    if kept in tried:
        rules, measured = tried[kept]
        found = dataclasses.replace(
            found, rules=rules, policy=short_text(policy), error=measured, emulated=measure(kept)
        )
    runs = chosen(kept)
    evidence = [
        one if i in runs or one.kept else dataclasses.replace(one, kept="budget")
        for i, one in enumerate(layers)
    ]
    return dataclasses.replace(
        found,
        matmul="" if policy.matmul is None else policy.matmul.text,
        smallest=smallest,
        layers=tuple(sorted(evidence, key=lambda one: -one.cost)),
        runs=trial.runs,
        compilations=found.compilations + len(tried),
    )


def _evidence(
    trial: Trial, scaled: ScaledDots, in_float32: Collection[Path], smallest: int
) -> Iterator[LayerEvidence]:
    """Yields the measurements of each layer alone, and why it is kept out before any search."""
    for i, (path, one) in enumerate(scaled.layers.items()):
        is_small = min(one.contraction, one.outputs) < smallest
        why = "in float32" if path in in_float32 else "too small to gain" if is_small else ""
        alone, cost = trial.measure_8_bits_alone(i), one.flops / max(scaled.total, 1)
        yield LayerEvidence(spelled(path), alone, cost, one.contraction, one.outputs, why)


def _states(
    trial: Trial, scaled: ScaledDots, in_float32: Collection[Path], in_8_bits: Collection[int]
) -> dict[Path, PathState]:
    """Returns the state of each path, with some layers in 8 bits. Only plain matmuls can be."""
    kept = {path for i, path in enumerate(scaled.layers) if i not in in_8_bits}
    states: dict[Path, PathState] = dict.fromkeys(trial.paths, "8 bits")
    for path in trial.paths:
        if path in in_float32:
            states[path] = "float32"
        elif path in kept | scaled.kept_out:
            states[path] = "half"
    return states


def out_of_8_bits(paths: Iterable[Path], policy: Policy) -> Callable[[str], Policy]:
    """Returns the policy of each pattern of paths that are kept out of 8 bits."""
    kept = policy.replace(matmul=None)
    inside = kept.replace(output_dtype=kept.compute_dtype)
    of_model = {spelled(path) for path in paths if (found := divided(path)) and not found[1]}
    return lambda pattern: kept if pattern in of_model else inside

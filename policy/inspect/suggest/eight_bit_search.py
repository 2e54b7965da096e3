"""Searches for the layers whose matmuls run in 8 bits within an error budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from policy.core.matmul_dtypes import ScaledMatmul
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.applied import applied, full_policies
from policy.inspect.suggest.eight_bits import LayerEvidence, Why
from policy.inspect.suggest.patterns import patterns_of_states
from policy.inspect.suggest.scaled_dots import ScaledDots
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import short_text
from policy.programs.paths import Path, divided, spelled

LayerState = Literal["8 bits", "half", "float32"]


class EightBitSearch:
    """Searches for the layers that run in 8 bits, beside the paths that are kept in float32.

    Args:
      trial: the compiled program.
      scaled: the matmuls that may run in 8 bits.
      policy: the policy with ``m=``.
      wide: the candidates of `trial` that are kept in float32.
      budget: the error allowed.
      smallest: the least contraction and number of outputs of a layer to run in 8 bits.
    """

    def __init__(
        self,
        trial: Trial,
        scaled: ScaledDots,
        policy: Policy,
        wide: WideModules,
        budget: float,
        smallest: int,
    ):
        self.trial, self.policy, self.wide = trial, policy, wide
        self.budget, self.smallest = budget, smallest
        self.convolutions = scaled.convolutions
        self.paths, self.layers = list(scaled.layers), list(scaled.layers.values())
        self.alone = [trial.measure_8_bits_alone(i) for i in range(len(self.layers))]
        self.costs = [one.flops / max(scaled.total, 1) for one in self.layers]
        self.kept: list[Why] = [self._why_kept(i) for i in range(len(self.layers))]
        self.free = [i for i, why in enumerate(self.kept) if not why]

    def _why_kept(self, i: int) -> Why:
        if self.paths[i] in self.trial.paths_of(self.wide):
            return "in float32"
        size = min(self.layers[i].contraction, self.layers[i].outputs)
        return "too small to gain" if size < self.smallest else ""

    def suggestion(self, found: Suggestion, by: ScaledMatmul) -> Suggestion:
        """Returns a suggestion for the policy with ``m=``, once its rules have met the budget.

        Where no layer may run in 8 bits it is the given one, with the reasons.

        Args:
          found: the suggestion for the policy without ``m=``.
          by: the matmuls of the policy.
        """
        chosen, rules, error, confirmations = self._confirmed()
        found = dataclasses.replace(
            found,
            matmul=by.text,
            smallest=self.smallest,
            layers=self._evidence(chosen),
            runs=self.trial.runs,
            compilations=found.compilations + confirmations,
        )
        if rules is None:
            return found
        emulated = self.trial.measure_in_8_bits(self.wide, chosen)
        return dataclasses.replace(
            found, rules=rules, policy=short_text(self.policy), error=error, emulated=emulated
        )

    def _confirmed(self) -> tuple[frozenset[int], PolicyRules | None, float, int]:
        """Returns the layers in 8 bits, their rules and error, and the number of runs with rules.

        The rules are None if none meets the budget.
        """
        costs, alone = ([each[i] for i in self.free] for each in (self.costs, self.alone))
        search = Search(self._measure, alone.__getitem__, costs, 2 * len(costs) - 1, alone)
        search.known[search.every] = 0.0  # confirmed without 8 bits
        tried: dict[WideModules, tuple[PolicyRules, float]] = {}

        def error(kept: WideModules) -> float:
            if kept == search.every:
                return 0.0
            states = self._states(self._chosen(kept))
            choices = [
                rules_from_states(states, self.policy, full) for full in full_policies(self.trial)
            ]
            tried[kept] = applied(self.trial, self.wide, choices, self.policy)
            return tried[kept][1]

        kept, _, _ = search.confirmed(self.budget, error)
        if kept == search.every:
            return frozenset(), None, 0.0, len(tried)
        return self._chosen(kept), *tried[kept], len(tried)

    def _chosen(self, kept: WideModules) -> frozenset[int]:
        return frozenset(layer for i, layer in enumerate(self.free) if i not in kept)

    def _measure(self, kept: WideModules) -> float:
        return self.trial.measure_in_8_bits(self.wide, self._chosen(kept))

    def _states(self, chosen: frozenset[int]) -> dict[Path, LayerState]:
        """Returns how each path runs. Convolutions are kept in half precision."""
        wide = self.trial.paths_of(self.wide)
        kept = {path for i, path in enumerate(self.paths) if i not in chosen} | self.convolutions

        def state(path: Path) -> LayerState:
            return "float32" if path in wide else "half" if path in kept else "8 bits"

        return {path: state(path) for path in self.trial.paths}

    def _evidence(self, chosen: frozenset[int]) -> tuple[LayerEvidence, ...]:
        """Returns the measurements of each layer, the largest cost first."""
        found: list[LayerEvidence] = []
        for i, (path, one) in enumerate(zip(self.paths, self.layers, strict=True)):
            why: Why = "" if i in chosen else self.kept[i] or "budget"
            sizes = one.contraction, one.outputs
            found.append(LayerEvidence(spelled(path), self.alone[i], self.costs[i], *sizes, why))
        return tuple(sorted(found, key=lambda one: -one.cost))


def rules_from_states(
    states: Mapping[Path, LayerState], policy: Policy, full: Policy
) -> PolicyRules:
    """Returns the rules that give each path its state under a policy with ``m=``.

    Args:
      full: the policy of the paths in float32.
    """
    kept = policy.replace(matmul=None)
    inside = kept.replace(output_dtype=kept.compute_dtype)
    of_model = {spelled(path) for path in states if (found := divided(path)) and not found[1]}

    def obeyed(pattern: str, state: LayerState) -> Policy:
        if state == "half":
            return kept if pattern in of_model else inside
        return full if state == "float32" else policy

    named: list[tuple[str, LayerState]] = patterns_of_states(states, "8 bits")
    return PolicyRules([(pattern, obeyed(pattern, state)) for pattern, state in named])
